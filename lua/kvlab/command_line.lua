--- The options of the command line. `./kvlab VERB` fills this table before anything runs,
-- so a script reads `kv.command_line.seed`. Under stock luajit the defaults stay.

---@class kvlab.CommandLine
---@field device string            auto, cpu, cuda or cuda:N
---@field isa string|nil           cpu: the instruction set; nil: the best there is
---@field seed integer             seed of everything random
---@field out string|nil           folder for results; nil: the script's own choice
---@field set table<string, string|number|boolean>  from --set KEY=VALUE
---@field path string|nil          with policies/, splits/ and others (kvlab.named)
---@field policy string|nil        test policy: the file of the policy
---@field quick boolean            do a small version of the work
---@field args string[]            words after the script's name, and all after `--`
---@field check boolean|nil        also check what scores and selections hold on a GPU
---@field link-gbps number|nil     cpu: emulate a link of this speed to pinned memory
---@field link-us number|nil       its latency in microseconds; set if link-gbps is
---@field interactive boolean|nil run: then open the REPL with the script's variables
---@field words string[]           all words after the verb; option and value are one word
---@field arguments string[]       those of `words` that an experiment's rows depend on
---@field shard {index: integer, count: integer}|nil  run: only this part of the work
---@field jobs integer|nil         run: the number of processes
---@field keep-going boolean|nil   run: go on when a configuration fails
---@field csv boolean|nil          run: also write results.csv
---@field over string|nil         run: the cost on x axes, see kvlab.experiment.costs
---@field worker boolean|nil       run: a parent process sends the configurations to run
---@field merge boolean|nil        run: take rows over from shards, compute none
---@field environment table|nil    merge: that of the shards, see kvlab.experiment
---@field slurm string|nil         sweep submit: options of sbatch
---@field shards integer|nil       sweep submit: the number of shards
---@field retries integer|nil      sweep submit: how often to submit failed shards again
---@field at-once integer|nil      sweep submit: how many tasks of an array run at a time
---@field metric string[]|nil      compare: show only these metrics
---@field by string[]|nil          compare: show a line for every value of these axes
---@field full boolean|nil         test: every combination of shapes, not a sample
---@field json boolean|nil         bench, time: print rows as JSON lines
---@field help boolean|nil         run: print what the script takes and compute nothing
---@field list boolean|nil         bench, run, test: print names and do no work
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
