local M = {}
function M.render() error "later" end
return M
