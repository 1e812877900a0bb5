--- The version of kvlab, "0.2.0", as the file VERSION beside the front door states it.
local root = debug.getinfo(1, "S").source:match "^@(.*)lua/kvlab/version%.lua$"
local file = assert(io.open(root .. "VERSION"))
local version = file:read "*l"
file:close()

return version
