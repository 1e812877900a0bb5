--- The command line's options: `kvlab VERB` fills this table before anything runs, so a
-- script, spec or module that wants one reads `require("kvlab.options").seed`.
-- Under stock luajit the defaults stay.

---@class kvlab.options
---@field device string            auto, cpu, cuda or cuda:N
---@field seed integer             seed of everything random
---@field out string|nil           folder for results; nil: the script's own choice
---@field set table<string, string|number|boolean>  from --set KEY=VALUE
---@field quick boolean            a small version of the work is enough
---@field args string[]            words after the script's name, and all after `--`
---@field link-gbps number|nil     cpu: emulate a link of this speed to pinned memory
---@field link-us number|nil       its latency in microseconds; there when link-gbps is
---@field interactive boolean|nil run: the REPL goes on with the script's variables
---@field json boolean|nil         bench: rows as JSON lines
---@field list boolean|nil         bench, test: names instead of work
local M = {
  device = "auto",
  seed = 0,
  out = nil,
  set = {},
  quick = false,
  args = {},
}

return M
