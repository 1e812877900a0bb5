--- Calls the functions and methods of docs/api_lua.md with random arguments. A child
-- process makes the calls of some rounds; each round has a world of its own (a cache,
-- sequences, an attention, …), so that one round can be made again.
--
--   ./kvlab run spec/fuzz.lua --set calls=1000000 [--seed=N]   counts what fails
--   ./kvlab run spec/fuzz.lua --set round=17 [--seed=N]   shows the calls of a round
--
-- A failure is a crash, a hang, an error of LuaJIT's own ("attempt to index a nil
-- value"), which does not name the argument that is wrong, or an error that blames a line
-- of lua/kvlab in place of the caller's.
--
-- A call that is refused is made again with the argument that the error names mended, so
-- that what is behind its check is called, too.
local kv = require "kvlab"
local root = kv.paths.root
package.path = root .. "/?.lua;" .. package.path -- a child runs in a folder of its own
local sorted = require "kvlab.sorted"
local support = require "spec.support"
local temporary = require "spec.temporary"
local world = require "spec.fuzz_world"

local M = {}

local CALLS_OF_ROUND, ROUNDS_OF_CHILD, SECONDS_OF_CHILD = 50, 200, 120
-- How often a call is made again with the argument that was refused mended.
local MENDS = 6

-- ---- what is called -------------------------------------------------------------------

-- Functions that the calls leave out, and why.
local LEFT_OUT = {
  ["kv.check"] = "its argument is a status", ["tensor:data"] = "hands out a raw pointer",
  ["kv.cuda_available"] = "opens another device",
  ["kv.experiment.run"] = "needs a script",
  ["Record:explain"] = "of a running experiment, as the next two",
  ["Record:interrupted"] = "", ["Record:failure"] = "",
  ["Store:replayed"] = "a part of a tally", ["Store:copy"] = "a part of a tally",
  ["Model:chat"] = "reads what is typed",
  ["HttpServer:run"] = "serves until Ctrl-C",
  ["HttpServer:turn"] = "waits as long as it is told",
}

-- What the page's names begin with, besides kv.
local MODULES = { engine = "models.engine", llama = "models.llama",
                  gemma = "models.gemma", deepseek = "models.deepseek",
                  families = "models.families", checkpoint = "models.checkpoint",
                  small_lm = "models.small_lm", exam = "models.recall.exam",
                  reading = "models.reading" }

-- What a device opens has methods too; the page lists them with their classes only.
local OPENED = { "stream:sync()", "stream:wait(event)", "stream:close()", "event:sync()",
  "event:record(stream)", "event:done()", "event:elapsed_us(event)", "event:close()",
  "graph:replay()", "graph:close()" }

--- The functions of the page: { name, class, method, parameters }. A method's class has
-- the file in front, because some names occur twice: "kvlab/memory/cache Cache".
local function functions()
  local list, section, page = {}, nil, {}
  for line in io.lines(root .. "/docs/api_lua.md") do page[#page + 1] = line end
  page[#page + 1] = "### opened.lua"
  for _, line in ipairs(OPENED) do page[#page + 1] = line end
  for _, line in ipairs(page) do
    section = line:match "^### ([%w_/]+)%.lua" or section
    local name, parameters = line:match "^([%a][%w_.:]*)(%b())$"
    if name and section and not LEFT_OUT[name] then
      local names = {}
      for parameter in parameters:gmatch "[%w_.]+" do names[#names + 1] = parameter end
      local class, method = name:match "^([%w_]+):([%w_]+)$"
      list[#list + 1] = { name = name, method = method, parameters = names,
        section = section,
        class = class and (section:gsub("^kvlab/", "") .. " " .. class) }
    end
  end
  return list
end

local function function_of(name)
  local base, rest = name:match "^([%w_]+)%.(.*)$"
  local value = base == "kv" and kv or MODULES[base] and require(MODULES[base])
  for part in (rest or ""):gmatch "[^.]+" do value = value and value[part] end
  return rest and value or nil
end

-- ---- what counts as a failure ---------------------------------------------------------

-- Words of LuaJIT and its libraries. An error of kvlab's has none of them.
local UNNAMED = { "attempt to ", "bad argument #", "cannot convert", "table index is",
  "stack overflow", "not enough memory", "assertion failed", "'for' initial",
  "'for' limit", "'for' step", "wrong number of arguments", "has no member named",
  "invalid value", "table overflow", "string length overflow", "number expected",
  "expected, got ", "invalid option '", "invalid conversion", "unknown or too large",
  "interval is empty", "cannot yield", "cannot resume", "loop in " }

--- Why an error is no answer for users; nil where it is one.
local function unnamed(why)
  if type(why) ~= "string" then return "error value is a " .. type(why) end
  if why:find(world.OWN, 1, true) then return nil end
  if why:find(root .. "/lua/kvlab/", 1, true) == 1 then return "blames kvlab: " .. why end
  for _, words in ipairs(UNNAMED) do
    if why:find(words, 1, true) then return why end
  end
end

-- ---- a child --------------------------------------------------------------------------

local function show(value)
  if kv.is_tensor(value) then return "a tensor" end
  return type(value) == "string" and ("%q"):format(value) or tostring(value)
end

--- Calls a function or a method. Returns what pcall does.
local function call(target, receiver, self, arguments, n)
  local fn = not target.class and function_of(target.name)
  if fn then return pcall(fn, unpack(arguments, 1, n)) end
  return pcall(function()
    return receiver[target.method](self, unpack(arguments, 1, n))
  end)
end

--- Makes the calls of one round. `tell` hears of every call before it is made, `raised`
-- of every error: the function, and why the error does not name what is wrong, or nil.
local function run_round(round, seed, targets, tell, raised)
  local rng = support.rng(seed * 1000003 + round)
  local w = world.new(rng)
  for i = 1, CALLS_OF_ROUND do
    local target = targets[1 + rng(#targets)]
    -- The world may be in pieces: what was closed cannot make a receiver.
    local ok, receiver = true, nil
    if target.class then ok, receiver = pcall(world.MAKERS[target.class], w, rng) end
    local made, arguments, n = pcall(world.arguments_for, target, w, rng)
    if ok and made and (receiver ~= nil or not target.class) then
      local self = receiver
      if rng(32) == 0 then -- called with `.`
        local found, other = pcall(world.any_value, w, rng)
        if found then self = other end
      end
      for _ = 1, MENDS do
        tell(i, target, arguments, n)
        local good, why = call(target, receiver, self, arguments, n)
        if not good then raised(target.name, unnamed(why)) end
        local known, mended = pcall(world.mend, target, arguments, why, w, rng)
        if good or not (known and mended) then break end
        n = #target.parameters
      end
    end
  end
  pcall(function() kv.device("cpu"):sync() end)
  temporary.remove()
end

local function reachable()
  local list = {}
  for _, target in ipairs(functions()) do
    local is_there = not target.class and function_of(target.name)
    if world.MAKERS[target.class] or is_there then list[#list + 1] = target end
  end
  return list
end

--- The names of the page's functions that no call can reach. LEFT_OUT has the ones that
-- are left out on purpose.
function M.left_out()
  local names, is_called = {}, {}
  for _, target in ipairs(reachable()) do is_called[target.name] = true end
  for _, target in ipairs(functions()) do
    if not is_called[target.name] then names[#names + 1] = target.name end
  end
  return names
end

--- The work of a child: rounds first … last, noted in a file line by line.
function M.child(first, last, seed, path)
  local out = assert(io.open(path, "a"))
  local targets = reachable()
  local function note(...)
    out:write(table.concat({ ... }), "\n")
    out:flush()
  end
  for round = first, last do
    note("round ", round)
    run_round(round, seed, targets, function(_, target) note("call ", target.name) end,
      function(name, why)
        if why then note("unnamed ", name, "\t", (why:gsub("%s+", " ")))
        else note "named" end
      end)
    collectgarbage()
  end
  note "end"
end

-- ---- the campaign ---------------------------------------------------------------------

--- What a child noted: its calls, its failures, and where it ended.
local function read_notes(path, result)
  local round, name, ended
  for line in io.lines(path) do
    local kind, rest = line:match "^(%w+) ?(.*)$"
    if kind == "round" then round = tonumber(rest)
    elseif kind == "call" then
      name, result.calls = rest, result.calls + 1
    elseif kind == "named" then result.named = result.named + 1
    elseif kind == "unnamed" then
      result.unnamed = result.unnamed + 1
      result.functions[#result.functions + 1] = rest
      local place = rest:gsub(root .. "/", ""):gsub("^%S+\t(%S+%.lua:%d+:)", "%1")
      result.places[place] = (result.places[place] or 0) + 1
    elseif kind == "end" then ended = true end
  end
  return round, name, ended
end

-- Not the front door, which would build first.
local PROGRAM = "'" .. (kv.paths.executable or root .. "/kvlab") .. "'"

--- Makes at least `calls` calls. Returns the counts, and in places and ends what failed.
---@param calls integer
---@param seed integer
function M.campaign(calls, seed)
  local result = { calls = 0, named = 0, unnamed = 0, crashes = 0, hangs = 0, places = {},
                   ends = {}, functions = {} }
  local folder, path = os.tmpname(), os.tmpname()
  os.remove(folder)
  os.execute(("mkdir %s"):format(folder))
  local round = 0
  while result.calls < calls do
    local wanted = math.ceil((calls - result.calls) / CALLS_OF_ROUND)
    local last = round + math.min(ROUNDS_OF_CHILD, wanted) - 1
    io.open(path, "w"):close()
    -- A file that grows too large is an error of the call, as on a full disk: no signal.
    local status = os.execute(("cd %s && ulimit -v 8000000 && ulimit -f 100000 && "
      .. "trap '' XFSZ && timeout -s KILL %d "
      .. "%s run %s/spec/fuzz.lua --device=cpu --seed=%d "
      .. "--set first=%d --set last=%d --set notes=%s > out 2>&1"):format(folder,
      SECONDS_OF_CHILD, PROGRAM, root, seed, round, last, path))
    local at, name, ended = read_notes(path, result)
    if not ended then
      local hung = status == 137 * 256 or status == 137
      local kind = hung and "hangs" or "crashes"
      result[kind] = result[kind] + 1
      result.ends[#result.ends + 1] = ("%s in round %s: %s (status %s)"):format(kind,
        tostring(at), tostring(name), tostring(status))
      if not at then
        error("a child did not start:\n" .. io.open(folder .. "/out"):read "*a")
      end
      last = at
    end
    round = last + 1
  end
  os.remove(path)
  os.execute(("rm -rf %s"):format(folder))
  return result
end

--- The counts in words, and every failure.
function M.text(result)
  local lines = { ("%d calls: %d errors that name what is wrong, %d that do not (%d "
    .. "places), %d crashes, %d hangs"):format(result.calls, result.named, result.unnamed,
      #sorted.keys(result.places), result.crashes, result.hangs) }
  for _, line in ipairs(result.ends) do lines[#lines + 1] = line end
  for _, place in ipairs(sorted.keys(result.places)) do
    lines[#lines + 1] = ("%6d  %s"):format(result.places[place], place)
  end
  return table.concat(lines, "\n")
end

local set, seed = kv.command_line.set, kv.command_line.seed
if set.notes then
  M.child(set.first, set.last, seed, set.notes)
elseif set.round then
  run_round(set.round, seed, reachable(), function(i, target, arguments, n)
    local words = {}
    for k = 1, n do words[k] = show(arguments[k]) end
    print(("%3d %s(%s)"):format(i, target.name, table.concat(words, ", ")))
    io.stdout:flush()
  end, function(name, why)
    if why then print("    FAILED " .. name .. ": " .. why) end
  end)
elseif set.calls then
  local result = M.campaign(set.calls, seed)
  print(M.text(result))
  if result.crashes + result.hangs + result.unnamed > 0 then os.exit(1) end
end

return M
