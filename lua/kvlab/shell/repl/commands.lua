--- The REPL's own commands: `:name`, and what stands behind `?` and `$`.
local compile = require "kvlab.shell.repl.compile"
local inspect = require "kvlab.shell.repl.inspect"
local hint = require("kvlab.words").hint
local sorted = require "kvlab.sorted"
local command_line = require "kvlab.command_line"

local M = {}

local commands = {}

--- The names, for completion.
---@return string[]
function M.names() return sorted.keys(commands) end

--- Whether there is a command of this name.
---@param name string
---@return boolean
function M.has(name) return commands[name] ~= nil end

--- An error whose text is shown as it is.
local function refuse(fmt, ...) error(fmt:format(...), 0) end

--- A text as a function in the session: an expression, or a statement.
local function compile_for(session, text)
  local chunk, problem = compile(text, "=" .. session:chunk_name(), session:line())
  if not chunk then refuse("%s", problem) end
  return setfenv(chunk, session.scope.environment)
end

local function print_table(header, rows)
  io.stdout:write(require("kvlab.report.table").text { header = header, rows = rows })
end

-- ---- devices and memory ---------------------------------------------------------------

commands.device = { "[NAME]", "the devices; with a name, work goes there from now on",
  function(session, name)
    local kv = session.environment.kv
    if name ~= "" then
      kv.device(name)
      command_line.device = name
    end
    local has_cuda, reason = kv.cuda_available()
    local current, rows = kv.device():name(), {}
    for i, device_name in ipairs { "cpu", has_cuda and "cuda" or nil } do
      local dev = kv.device(device_name)
      rows[i] = { dev:name() == current and "*" or "", dev:name(), dev:description() }
    end
    print_table({ "", "device", "" }, rows)
    if not has_cuda then io.stdout:write(reason, "\n") end
  end }

local function device_rows()
  local rows = {}
  for i, dev in ipairs(require("kvlab.tensor.device").opened()) do
    local s = dev:stats()
    rows[i] = { dev:name(), inspect.bytes(s.bytes_live), inspect.bytes(s.bytes_live_peak),
      inspect.bytes(s.bytes_cached), inspect.bytes(s.bytes_pinned),
      inspect.bytes(s.bytes_free), inspect.bytes(s.bytes_total), s.allocations,
      s.launches }
  end
  return rows
end

--- One row for every KV cache that is open: its pool, its tier, and what it counted.
local function cache_rows()
  local rows = {}
  for cache in pairs(require("kvlab.memory.cache").open) do
    local memory, s = cache.memory, cache:stats()
    rows[#rows + 1] = { cache.device:name(), cache.tier.name, cache.layers, cache.blocks,
      cache:blocks_free(), cache.block_size, cache.format.name,
      inspect.bytes(memory:bytes()), inspect.bytes(s.bytes_held),
      inspect.bytes(s.bytes_peak), inspect.bytes(s.bytes_evicted),
      inspect.bytes(s.bytes_moved) }
  end
  return rows
end

commands.mem = { "", "memory of the devices, and the KV pools with their tier",
  function(session)
    session.environment.kv.device()
    print_table({ "device", "live", "peak", "cached", "pinned", "free", "total",
      "allocations", "launches" }, device_rows())
    local rows = cache_rows()
    if #rows == 0 then return end
    io.stdout:write "\n"
    print_table({ "KV pool", "tier", "layers", "blocks", "free", "block_size", "format",
      "bytes", "held", "peak", "evicted", "moved" }, rows)
  end }

-- ---- looking --------------------------------------------------------------------------

local baseline = {} -- globals that were there before the session
for key in pairs(_G) do baseline[key] = true end

commands.who = { "", "the session's variables with types and sizes",
  function(session)
    local variables = {}
    for key, value in pairs(_G) do
      if not baseline[key] then variables[key] = value end
    end
    for key, value in pairs(session.scope:variables()) do
      if not session.hidden[key] then variables[key] = value end
    end
    local rows = {}
    for i, key in ipairs(sorted.keys(variables)) do
      rows[i] = { key, inspect.summary(variables[key]) }
    end
    if #rows == 0 then io.stdout:write "no variables yet\n" return end
    print_table({ "name", "type", "size" }, rows)
  end }

--- The policy that a word names: a quoted word, or a bare one if the session has no
-- variable of this name.
local function policy_of(session, text)
  local quoted = text:match "^[\"']([%a_][%w_]*)[\"']$"
  if quoted then return require("kvlab.policy.policy")(quoted) end
  if not text:find "^[%a_][%w_]*$" or session.scope:variables()[text] ~= nil
     or rawget(_G, text) ~= nil then return nil end
  return require("kvlab.policy.policy")(text)
end

--- A value's kernels as a table of times.
local function time_kernels(value)
  local header, rows, over = require("kvlab.shell.repl.kernels").time(value)
  print_table(header, rows)
  io.stdout:write(over, "\n")
end

commands.time = { "CODE", "how long it takes; of an expression or policy, its kernels",
  function(session, text)
    if text == "" then refuse ":time needs an expression or a statement" end
    local timing = require "kvlab.shell.repl.timing"
    local kernels, value = require "kvlab.shell.repl.kernels", policy_of(session, text)
    if value then return time_kernels(value) end
    local fn = compile_for(session, text)
    local seconds = timing.runs(function() value = fn() end)
    if kernels.is_timed(value) then
      time_kernels(value)
    elseif #seconds == 1 then
      io.stdout:write(timing.text(seconds[1]), "\n")
    else
      io.stdout:write(("%s, the median of %d runs; the best %s\n"):format(
        timing.text(timing.median(seconds)), #seconds, timing.text(seconds[1])))
    end
  end }

commands.kernel = { "VALUE", "the kernels of an expression, map, policy or source text",
  function(session, text)
    if text == "" then refuse ":kernel needs an expression, a map or a policy" end
    local value = policy_of(session, text) or compile_for(session, text)()
    require("kvlab.shell.repl.kernels").show(value)
  end }

commands.plot = { "VALUE [FILE]", "a tensor or a plot; as .svg, .pdf or .png",
  function(session, text)
    local code, path = text:match "^(.-)%s+(%S+%.%l+)$"
    local ending = path and path:match "%.(%l+)$"
    if ending ~= "svg" and ending ~= "pdf" and ending ~= "png" then
      code, path = text, nil
    end
    if code == "" then refuse ":plot needs a tensor or a plot" end
    if ending and not path and not compile(text, "=" .. session:chunk_name(), 1) then
      refuse("a picture is a file that ends with .svg, .pdf or .png, not .%s", ending)
    end
    local value = compile_for(session, code)()
    require("kvlab.shell.repl.picture").draw(value, path, code,
      { columns = session.columns(), colour = session.is_coloured })
  end }

commands.help = { "", "this text",
  function()
    for _, name in ipairs(M.names()) do
      local usage = ":" .. name .. " " .. commands[name][1]
      io.stdout:write(("%-26s %s\n"):format(usage, commands[name][2]))
    end
    io.stdout:write [[
?NAME                      what the sources say: ?kv.randn ?tensor:topk ?quest ?kvl_topk
?policy                    the policies, a line each
$ COMMAND                  a shell command
_  _3                      the last result; the result of input 3 (20 are kept)
expression;                is not printed
kv.reload "policies.NAME"  reads a module's file again
Tab                        completes; Ctrl-R searches the history; Ctrl-C interrupts
]]
  end }

-- ---- running --------------------------------------------------------------------------

local function help(session, name)
  if name == "" then return commands.help[3]() end
  local text, reason = require("kvlab.shell.repl.help").text(name,
    session.scope:variables())
  if not text then refuse("%s", reason) end
  io.stdout:write(text, "\n")
end

--- Runs a line that begins with `:`, `?` or `$`.
---@param session kvlab.Session
---@param line string
function M.run(session, line)
  local sign, rest = line:match "^%s*([:?$])%s*(.-)%s*$"
  if sign == "?" then return help(session, rest) end
  if sign == "$" then
    io.stdout:flush()
    os.execute(rest)
    return
  end
  local name, text = rest:match "^(%w*)%s*(.*)$"
  local command = commands[name] or refuse("no command :%s%s", name,
    hint(name, M.names(), "; did you mean :%s?"))
  command[3](session, text)
end

return M
