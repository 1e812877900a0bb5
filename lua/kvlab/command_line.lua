--- The options of the command line. `./kvlab VERB` fills this table before anything runs,
-- so a script reads `kv.command_line.seed`. Under stock luajit the defaults stay.

---@class kvlab.CommandLine
---@field device string            auto, cpu, cuda or cuda:N
---@field seed integer             seed of everything random
---@field out string|nil           folder for results; nil: the script's own choice
---@field set table<string, string|number|boolean>  from --set KEY=VALUE
---@field path string|nil          folders with policies/ and priorities/, see kvlab.named
---@field policy string|nil        test policy: the file of the policy
---@field quick boolean            a small version of the work is enough
---@field args string[]            words after the script's name, and all after `--`
---@field link-gbps number|nil     cpu: emulate a link of this speed to pinned memory
---@field link-us number|nil       its latency in microseconds; there when link-gbps is
---@field interactive boolean|nil run: the REPL goes on with the script's variables
---@field words string[]           all after the verb, an option and its value as one
---@field arguments string[]       those of `words` that an experiment's rows depend on
---@field shard {index: integer, count: integer}|nil  run: this part of the configurations
---@field jobs integer|nil         run: so many processes
---@field keep-going boolean|nil   run: a configuration that fails does not end the run
---@field csv boolean|nil          run: results.csv, too
---@field worker boolean|nil       run: another process says which configurations
---@field merge boolean|nil        run: rows are taken over from shards, not computed
---@field environment table|nil    of the shards that are merged, see kvlab.experiment
---@field slurm string|nil         sweep submit: options of sbatch
---@field shards integer|nil       sweep submit: in how many parts
---@field retries integer|nil      sweep submit: how often failed shards are tried again
---@field at-once integer|nil      sweep submit: how many tasks of an array run at a time
---@field metric string[]|nil      compare: these metrics only
---@field by string[]|nil          compare: a line for every value of these axes
---@field json boolean|nil         bench: rows as JSON lines
---@field list boolean|nil         bench, run, test: names instead of work
local M = {
  device = "auto",
  seed = 0,
  out = nil,
  set = {},
  quick = false,
  args = {},
  words = {},
  arguments = {},
}

return M
