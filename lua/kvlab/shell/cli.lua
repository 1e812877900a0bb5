--- The command line inside the executable: reads `VERB [options] [arguments]`, fills
-- kvlab.command_line and runs the verb. verbs.txt lists the options. The front door, the
-- script ./kvlab, runs first: it answers --help and takes the options of the build.
local hint = require("kvlab.words").hint
local number = require "kvlab.number"
local options = require "kvlab.command_line"
local secrets = require "kvlab.secrets"
local sorted = require "kvlab.sorted"

local M = {}

--- Raises for a wrong command line: it leads to one line on stderr and exit status 2.
local function misuse(fmt, ...)
  error({ misuse = fmt:format(...) }, 0)
end

local function to_device(text)
  local is_cuda = text == "cuda" or text:match("^cuda:%d+$")
  if is_cuda or text == "auto" or text == "cpu" then return text end
  misuse('--device is auto, cpu, cuda or cuda:N; given "%s"', text)
end

--- Chooses the instruction set before anything else, because rows, names of devices and
-- all ops depend on it.
local function to_isa(text)
  local C = require("kvlab.library").C
  if C.kvl_cpu_use_isa(text) < 0 then
    misuse("--isa: %s", require("ffi").string(C.kvl_last_error()))
  end
  return text
end

local function to_seed(text)
  local seed = text:match("^%d+$") and tonumber(text)
  if seed and seed < 2 ^ 53 then return seed end
  misuse('--seed is a whole number from 0 to 2^53; given "%s"', text)
end

local function to_gb_s(text)
  local gb_s = tonumber(text)
  if gb_s and gb_s > 0 and gb_s < math.huge then return gb_s end
  misuse('--link-gbps is a number above 0; given "%s"', text)
end

local function to_us(text)
  local us = tonumber(text)
  if us and us >= 0 and us < math.huge then return us end
  misuse('--link-us is a number >= 0; given "%s"', text)
end

--- "0.5" is a number, "true" a boolean, anything else a string.
local function to_value(text)
  if text == "true" then return true elseif text == "false" then return false end
  return number.of_text(text) or text
end

local function add_setting(text)
  local key, value = text:match("^([^=]+)=(.*)$")
  if not key then misuse('--set takes KEY=VALUE; given "%s"', text) end
  options.set[key] = to_value(value)
  return options.set
end

local function to_list(text)
  local list = {}
  for word in text:gmatch("%s*([^,]*[^,%s])%s*") do list[#list + 1] = word end
  return list
end

local function to_text(text, name)
  if text == "" then misuse("--%s is empty", name) end
  return text
end

local function to_whole(text, name)
  if text:match "^%d+$" then return tonumber(text) end
  misuse('--%s is a whole number; given "%s"', name, text)
end

local function to_count(text, name)
  local n = to_whole(text, name)
  return n >= 1 and n or misuse("--%s is a whole number from 1; given 0", name)
end

local function to_shard(text)
  local index, count = text:match "^(%d+)/(%d+)$"
  index, count = tonumber(index), tonumber(count)
  if index and 1 <= index and index <= count then
    return { index = index, count = count }
  end
  misuse('--shard is I/N, such as 1/4 to 4/4; given "%s"', text)
end

local FLAG = true -- an option without a value
local function maybe_text(text) return text end -- "" if there is no value

--- The functions that read an option's value, by the names that verbs.txt uses.
local readers = {
  flag = FLAG, text = to_text, maybe_text = maybe_text, list = to_list, whole = to_whole,
  count = to_count, device = to_device, isa = to_isa, seed = to_seed, gb_s = to_gb_s,
  us = to_us, setting = add_setting, shard = to_shard,
}
local by_front_door = { build = true, help = true }

local table_path = debug.getinfo(1, "S").source:gsub("^@(.*)cli%.lua$", "%1verbs.txt")

--- Looks up the options of a verb in verbs.txt. Returns name -> reader for the options
-- that are read here, and the names of all options that a message to the user may
-- mention.
local function options_of(verb)
  local known, names, is_ours = {}, {}, { [verb] = true } -- the verb, and its groups
  for line in io.lines(table_path) do
    local group, verbs = line:match "^group|(.-)|(.-)|"
    if group then is_ours[group] = verbs:find("%f[%l]" .. verb .. "%f[%L]") end
    local owners, name, kind, meaning =
      line:match "^option|(.-)|%-%-([%l-]+).-|(.-)|(.*)$"
    for owner in (owners or ""):gmatch "%S+" do
      if is_ours[owner] then
        if not by_front_door[kind] then known[name] = assert(readers[kind], line) end
        if meaning ~= "" then names[#names + 1] = name end
      end
    end
  end
  return known, names
end

-- The rows do not depend on these options, which say where, when and how to compute.
local apart = { out = true, shard = true, jobs = true, ["keep-going"] = true, list = true,
                csv = true, formats = true, over = true, worker = true, slurm = true,
                shards = true, retries = true, ["at-once"] = true }

--- Notes a word of the command line, so that it can be passed to another process.
local function note(word, is_apart)
  options.words[#options.words + 1] = word
  if not is_apart then options.arguments[#options.arguments + 1] = word end
end

--- Raises if an option, or a setting of --set, is given a second time.
---@param given table<string, string>  the words of those that were read, by name
local function refuse_second(given, name, value, word)
  local key = name == "set" and "--set " .. value:match "^[^=]*" or name
  local other = given[key]
  given[key] = word
  if other == word then misuse("%s is given twice", word) end
  if other then
    misuse("both %s and %s are given, expected one%s", other, word, name == "set"
      and "; several values of an axis are separated by commas" or "")
  end
end

--- Reads the option `words[i]`. Returns the index of the last word that it took.
local function parse_option(known, names, given, words, i)
  local name, value = words[i]:match("^%-%-([^=]+)=?(.*)$")
  local has_value = words[i]:find("=", 1, true)
  local read = known[name]
  if not read then
    local is_known = false -- to ./kvlab, which builds
    for _, other in ipairs(names) do is_known = is_known or other == name end
    if is_known then
      misuse("--%s is an option of ./kvlab, which builds; nothing is built here", name)
    end
    misuse("unknown option --%s%s", name, hint(name, names, "; did you mean --%s?"))
  end
  if read == FLAG then
    if has_value then misuse("--%s takes no value", name) end
    refuse_second(given, name, "", words[i])
    options[name] = true
    note(words[i], apart[name])
    return i
  end
  if not has_value and read ~= maybe_text then
    i = i + 1
    value = words[i] or misuse("--%s needs a value", name)
  end
  refuse_second(given, name, value, ("--%s%s%s"):format(name,
    name == "set" and " " or "=", value))
  options[name] = read(value, name)
  note(("--%s=%s"):format(name, value), apart[name]
    or name == "set" and value:find "^fresh=")
  return i
end

--- Reads the words after the verb into the command line's table.
local function parse(verb, words)
  local known, names = options_of(verb)
  local given = {}
  options.words, options.arguments = {}, {}
  local i = 1
  while i <= #words do
    local word = words[i]
    if word == "--" then
      note "--"
      for j = i + 1, #words do
        options.args[#options.args + 1] = words[j]
        note(words[j])
      end
      break
    elseif word == "-i" and verb == "run" then
      options.interactive = true
    elseif (word == "-h" or word == "--help") and verb == "run" then
      options.help = true
    elseif word:match("^%-%-[^=]") then
      i = parse_option(known, names, given, words, i)
    elseif word:match("^%-%a") then
      misuse("unknown option %s; options begin with two dashes", word)
    else
      options.args[#options.args + 1] = word
      note(word)
    end
    i = i + 1
  end
  if options["link-gbps"] then
    options["link-us"] = options["link-us"] or 0
  elseif options["link-us"] then
    misuse "--link-us, the latency of a link, needs --link-gbps=N, its speed"
  end
end

local function root()
  local paths = package.loaded["kvlab.paths"]
  return paths and paths.root or "."
end

--- The path of a file: its name as given, or else inside the project; nil if there is no
-- such file.
local function locate(name)
  for _, candidate in ipairs { name, root() .. "/" .. name } do
    local file = io.open(candidate)
    if file then
      file:close()
      return candidate
    end
  end
end

--- One function per verb, which checks the arguments and returns the work to do.
local prepare = {}

--- The path of a script: a file, or the name of an experiment.
local function locate_script(word)
  local path = locate(word)
  if path or word:find "/" then return path or misuse("no such script: %s", word) end
  local name, folders = word:gsub("%.lua$", ""), { "experiments", "lua/experiments" }
  local names = {}
  for _, folder in ipairs(folders) do
    path = path or locate(("%s/%s.lua"):format(folder, name))
  end
  if path then return path end
  local files = require "kvlab.files"
  for _, folder in ipairs { "experiments", root() .. "/lua/experiments" } do
    for _, file in ipairs(files.list(folder)) do
      names[#names + 1] = file:match "^(.*)%.lua$"
    end
  end
  misuse("no such script: %s%s", word, hint(name, names))
end

function prepare.run()
  local script = table.remove(options.args, 1) or misuse "run needs a script: run SCRIPT"
  local path = locate_script(script)
  if options.interactive and not options.help then
    if options.jobs then misuse "-i and --jobs do not go together" end
    return function() return require("kvlab.shell.repl").main(path) end
  end
  local chunk, problem = loadfile(path)
  if not chunk then return function() error(problem, 0) end end
  if not options.help then return chunk end
  return function() return require("kvlab.experiment.help").script(path, chunk) end
end

function prepare.repl()
  if #options.args > 0 then
    misuse("repl takes no arguments; given %s: kvlab run -i SCRIPT runs a script first",
      options.args[1])
  end
  return function() return require("kvlab.shell.repl").main() end
end

--- The model of a verb that takes one.
local function model_of(verb)
  if #options.args == 1 then return options.args[1] end
  misuse("%s takes one model, a name, a folder or a GGUF file; given %s", verb,
    #options.args == 0 and "none" or table.concat(options.args, " "))
end

function prepare.chat()
  return require("kvlab.shell.chat").prepare(model_of "chat", options)
end

function prepare.serve()
  local name = model_of "serve"
  local work, problem = require("kvlab.shell.serve").prepare(name, options)
  return work or misuse("%s", problem)
end

local SWEEP = "submit SCRIPT --slurm --shards=N, status DIR or merge DIR SCRIPT"

--- The folder of a sweep without slashes at its end.
local function folder_of(word) return (word:gsub("(.)/+$", "%1")) end

local sweep = {}

function sweep.submit()
  local script = options.args[1] or misuse("submit needs a script: %s", SWEEP)
  locate_script(script) -- says that there is none
  if not options.slurm then
    misuse("submit needs --slurm, or --slurm='OPTIONS OF SBATCH'; to compute here, use"
      .. " kvlab run SCRIPT --jobs=N")
  elseif not options.shards then
    misuse "submit needs --shards=N, the number of parts"
  elseif options.set.fresh then
    misuse "fresh would throw rows away at every retry; choose another --out=DIR"
  end
  options.out = options.out or "results/" .. script:match("([^/]*)$"):gsub("%.lua$", "")
    .. (options.quick and "-quick" or "")
  return function() return require("kvlab.experiment.sweep").submit(options) end
end

function sweep.status()
  if #options.args ~= 1 then
    misuse "sweep status takes one folder: that of --out, or results/NAME"
  end
  local folder = folder_of(options.args[1])
  return function() return require("kvlab.experiment.sweep").status(folder) end
end

--- Runs the script of the shards, which takes over their rows and computes nothing. The
-- folder's manifest also names a script, but the folder may come from somebody else, who
-- must not decide what runs here.
function sweep.merge()
  local folder, script = folder_of(options.args[1] or ""), options.args[2]
  if folder == "" or #options.args > 2 then
    misuse "sweep merge takes a folder (that of --out, or results/NAME) and the script"
  end
  local _, manifest = require("kvlab.experiment.sweep.shards").open(folder)
  local arguments, at = { unpack(manifest.arguments) }, 1
  while arguments[at] and arguments[at]:find "^%-" do at = at + 1 end
  if not script then
    misuse("merging runs the script, so it has to be named: kvlab sweep merge %s %s",
      folder, arguments[at] or "SCRIPT")
  end
  arguments[at], options.args = script, {}
  parse("run", arguments)
  options.out, options.merge, options.environment = folder, true, manifest
  options.device = manifest.device == "cpu" and "cpu" or "auto"
  local run = prepare.run()
  return function()
    run()
    return 0
  end
end

function prepare.sweep(action)
  if not action then misuse("sweep needs an action: %s", SWEEP) end
  if not sweep[action] then
    misuse('sweep has no "%s"; there are %s', action, SWEEP)
  end
  return sweep[action]()
end

function prepare.compare()
  if #options.args ~= 2 then misuse "compare takes two folders of results" end
  local a, b = unpack(options.args)
  return function() return require("kvlab.experiment.compare").main(a, b, options) end
end

function prepare.new()
  local new = require "kvlab.shell.new"
  local kind, name = unpack(options.args)
  local kinds = table.concat(new.KINDS, ", "):gsub(", (%l+)$", " or %1")
  if not name or #options.args > 2 then
    misuse("new takes a kind, %s, and a name", kinds)
  elseif not new.FOLDERS[kind] then
    misuse('new has no "%s"; expected %s', kind, kinds)
  end
  return function() return new.main(kind, name, options.path or ".") end
end

function prepare.cache()
  local action = options.args[1]
  if #options.args > 1 or action and action ~= "clear" then
    misuse('cache takes nothing, or "clear"; given "%s"',
      table.concat(options.args, " "))
  end
  local kernels = require "kvlab.shell.kernels"
  return action and kernels.clear or kernels.show
end

function prepare.get()
  local get, name = require "kvlab.shell.get", options.args[1]
  if not name then return get.list end
  local names = sorted.keys(require("kvlab.downloads").CATALOGUE)
  if #options.args > 1 then misuse("get takes one name; given %s",
    table.concat(options.args, " ")) end
  for _, known in ipairs(names) do
    if known == name then return function() return get.fetch(name) end end
  end
  misuse('get knows no "%s"%s There is %s', name, hint(name, names):gsub("^$", "."),
    table.concat(names, ", "))
end

--- The part of `doctor` that the front door leaves to this program.
function prepare.doctor()
  if #options.args > 0 then misuse "doctor takes no arguments" end
  return require("kvlab.shell.kernels").doctor
end

--- The file of a policy's name.
local function path_of_policy(name)
  local named = require "kvlab.named"
  return named.path_of("policies", name)
    or misuse("no such policy: %s%s", name, hint(name, named.list "policies"))
end

-- Spec files with specs that every policy has to pass, including a user's own: their
-- names have the tag #policy (spec/tried_policies.lua).
local OF_POLICIES = { "policies/contract", "policies/rows", "lua/memory/offload",
  "models/evicting", "models/failed_steps", "models/replay", "models/random_steps",
  "models/draft_policy", "lua/policy/policy",
  "lua/observe/probe", "lua/serve/draft", "lua/serve/evicting", "lua/http/attacks" }

--- Checks that a policy's file does what every policy must do.
local function test_policy()
  local path = options.args[2]
  if not path or #options.args > 2 then misuse "test policy takes one file or name" end
  options.policy = locate(path) or path_of_policy(path)
  note("--policy=" .. options.policy) -- for the processes that run the files
  if not options.tags then
    options.tags = { "policy" }
    note "--tags=policy"
  end
  local specs = {}
  for i, name in ipairs(OF_POLICIES) do
    specs[i] = ("%s/spec/%s_spec.lua"):format(root(), name)
  end
  return function()
    require "kvlab.shell.policy_file"(options.policy) -- says what is wrong, once for all
    return require("kvlab.shell.test").main(root(), specs, options)
  end
end

function prepare.test()
  if options.args[1] == "policy" then return test_policy() end
  local files = {}
  for i, name in ipairs(options.args) do
    files[i] = locate(name) or misuse("no such spec: %s", name)
  end
  if #files == 0 then files[1] = root() .. "/spec" end
  return function() return require("kvlab.shell.test").main(root(), files, options) end
end

function prepare.time()
  if #options.args ~= 1 then
    misuse("time takes policies, separated by commas: names or files; given %s",
      #options.args == 0 and "none" or table.concat(options.args, " "))
  end
  local policies = {}
  for _, word in ipairs(to_list(options.args[1])) do
    local path = word:find "[/.]" and (locate(word) or misuse("no such file: %s", word))
    policies[#policies + 1] = path and { path = path } or { name = word }
    if not path then path_of_policy(word) end -- says that there is none
  end
  return function() return require("kvlab.shell.time").main(policies, options) end
end

function prepare.bench()
  if not package.searchpath("kvlab.shell.bench", package.path) then
    misuse "bench cannot run: lua/kvlab/shell/bench.lua is missing"
  end
  return function() return require("kvlab.shell.bench").main(options) end
end

--- Runs a command line.
---@param words string[]  the verb, options and arguments
---@return integer        # exit status: 0 fine, 1 failed, 2 the command line is wrong
function M.main(words)
  local verb = table.remove(words, 1) or "repl"
  local ok, work = pcall(function()
    if not prepare[verb] then
      misuse('unknown verb "%s"%s', verb, hint(verb, sorted.keys(prepare)))
    end
    local action = verb == "sweep" and table.remove(words, 1)
    parse(verb, words)
    return prepare[verb](action)
  end)
  if ok then
    local status = work()
    -- what a script returns is not an exit status
    return (verb ~= "run" or options.interactive) and status or 0
  end
  if type(work) ~= "table" or not work.misuse then error(work, 0) end
  io.stderr:write("kvlab: ", secrets.mask(work.misuse), "\n")
  return 2
end

return M
