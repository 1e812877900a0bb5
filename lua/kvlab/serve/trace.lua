--- Traces of requests in the format of Mooncake (FAST'25). Each line is a JSON object,
-- {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one for
-- each 512 tokens of the input, the last one for the rest]}. Two requests share a hash id
-- exactly when everything up to the end of its block is the same in both.
local arguments = require "kvlab.arguments"
local files = require "kvlab.files"
local json = require "kvlab.json"
local options = require "kvlab.options"
local sources = require "kvlab.sources"
local uniform = require "kvlab.tensor.uniform"

local M = {}

M.BLOCK = 512 -- tokens that a hash id stands for

---@class kvlab.TraceRow
---@field timestamp number
---@field input_length integer
---@field output_length integer
---@field hash_ids integer[]

local function bad(path, line, what)
  error(("%s, line %d: %s"):format(path, line, what), 0)
end

local function check_row(path, line, row)
  if type(row) ~= "table" then bad(path, line, "expected a JSON object") end
  for name, least in pairs { timestamp = 0, input_length = 1, output_length = 1 } do
    local value = row[name]
    if type(value) ~= "number" or value ~= value or value < least then
      bad(path, line, ("%s is %s, expected a number >= %d"):format(name, tostring(value),
        least))
    end
  end
  local want = math.ceil(row.input_length / M.BLOCK)
  if type(row.hash_ids) ~= "table" or #row.hash_ids ~= want then
    bad(path, line, ("hash_ids has %s ids, expected %d for %d tokens"):format(
      type(row.hash_ids) == "table" and #row.hash_ids or "no", want, row.input_length))
  end
end

--- Reads the requests of a file, at most `limit` of them. Errors name the path and line.
---@param path string
---@param limit? integer
---@return kvlab.TraceRow[]
function M.read(path, limit)
  local file, why = sources.open(path)
  if not file then error("trace: " .. why, 0) end
  local rows = {}
  for line in file:lines() do
    if limit and #rows >= limit then break end
    local ok, row = pcall(json.decode, line)
    if not ok then bad(path, #rows + 1, row) end
    check_row(path, #rows + 1, row)
    rows[#rows + 1] = row
  end
  file:close()
  if #rows == 0 then error(("trace: %s has no requests"):format(path), 0) end
  return rows
end

--- Writes rows in the form that read() takes.
---@param path string
---@param rows kvlab.TraceRow[]
function M.write(path, rows)
  local order = { order = { "timestamp", "input_length", "output_length", "hash_ids" } }
  local lines = {}
  for i, row in ipairs(rows) do
    local ok, text = pcall(json.encode, row, order)
    if not ok then options.fail(("trace.write: rows[%d]: %s"):format(i, text)) end
    lines[i] = text .. "\n"
  end
  local ok, why = pcall(files.write, path, table.concat(lines))
  if not ok then options.fail("trace.write: " .. why) end
end

-- ---- a workload of conversations ------------------------------------------------------

local DEFAULTS = { requests = 200, seed = 0, rate = 1, turns = 4, think_s = 30,
                   system_tokens = 1024, input_tokens = 4000, answer_tokens = 300 }

-- Lua holds a row for every request, and an id for every block of its input.
local MOST, IDS_MOST = 1000000, 20000000
local TOKENS = { "a number from 0 to 1000000", function(x)
  return type(x) == "number" and x >= 0 and x <= MOST
end }

local GENERATE = {
  requests = options.within(0, MOST), seed = options.any_whole, rate = options.positive,
  turns = options.positive, think_s = options.not_negative,
  system_tokens = TOKENS, input_tokens = TOKENS, answer_tokens = TOKENS,
}

--- Generates a workload of conversations. They begin at random times, and each has some
-- turns. The input of a turn is everything that was said before, with the answers, and
-- something new. Its hash ids equal those of the previous turn as far as the two inputs
-- are equal. All conversations share a system prompt.
---@param o? table  requests, seed; rate: requests a second; turns, on average; think_s:
--                 mean pause between an answer and the next turn; system_tokens;
--                 input_tokens: mean of what is new in a turn; answer_tokens: mean
---@return kvlab.TraceRow[]  in the order of their timestamps
function M.generate(o)
  o = options.check("trace.generate", o, GENERATE)
  local function get(name) return o[name] or DEFAULTS[name] end
  local ids_most = get "requests" / M.BLOCK * (get "system_tokens"
    + get "turns" * (get "input_tokens" + get "answer_tokens"))
  if ids_most > IDS_MOST then
    error(("trace.generate: about %.0f ids of blocks, expected at most %d: fewer "
      .. "requests, turns or tokens"):format(ids_most, IDS_MOST), 2)
  end
  local draw, rows, id, start = uniform.generator(get "seed"), {}, 0, 0
  local function exponential(mean) return -mean * math.log(1 - draw()) end
  local function fresh()
    id = id + 1
    return id - 1
  end
  local system = {}
  for i = 1, math.floor(get "system_tokens" / M.BLOCK) do system[i] = fresh() end
  while #rows < get "requests" do
    start = start + exponential(get "turns" / get "rate")
    local at, length, ids = start, get "system_tokens", {}
    for i, shared in ipairs(system) do ids[i] = shared end
    repeat
      length = length + 1 + math.floor(exponential(get "input_tokens"))
      for i = #ids + 1, math.ceil(length / M.BLOCK) do ids[i] = fresh() end
      local answer = 1 + math.floor(exponential(get "answer_tokens"))
      local own_ids = {}
      for i, block in ipairs(ids) do own_ids[i] = block end
      rows[#rows + 1] = { timestamp = math.floor(at * 1000), input_length = length,
                          output_length = answer, hash_ids = own_ids }
      at = at + exponential(get "think_s") + 0.02 * answer
      ids[math.floor(length / M.BLOCK) + 1] = nil -- not full: the answer fills it
      length = length + answer
      for i = #ids + 1, math.floor(length / M.BLOCK) do ids[i] = fresh() end
    until draw() < 1 / get "turns"
  end
  for i, row in ipairs(rows) do row.number = i end
  table.sort(rows, function(a, b)
    if a.timestamp ~= b.timestamp then return a.timestamp < b.timestamp end
    return a.number < b.number
  end)
  for i = #rows, get "requests" + 1, -1 do rows[i] = nil end
  for _, row in ipairs(rows) do row.number = nil end
  return rows
end

-- ---- replay ---------------------------------------------------------------------------

local SUBMIT = { rate = options.positive, deadline_us = options.callable }

--- Submits the requests of a trace to a server without a model.
---@param server kvlab.Server
---@param rows kvlab.TraceRow[]
---@param o? table  rate (1): how much faster than in the trace they come;
--                  deadline_us(row): how long the row's first token may take
function M.submit(server, rows, o)
  o = options.check("trace.submit", o, SUBMIT)
  local given = { hash_block = M.BLOCK }
  for _, row in ipairs(rows) do
    given.arrival_us = row.timestamp * 1000 / (o.rate or 1)
    local late_us = o.deadline_us and options.argument("trace.submit",
      "what deadline_us returns", o.deadline_us(row), options.number)
    given.deadline_us = late_us and given.arrival_us + late_us or nil
    given.input_length, given.max_tokens = row.input_length, row.output_length
    given.hash_ids = row.hash_ids
    local request, why = server:submit(given)
    if not request then error("trace: " .. why, 2) end
  end
end

--- The kind of a list of kvlab.TraceRow.
M.ROWS = options.list_of { "a row { timestamp, input_length, output_length, hash_ids }",
  function(x)
    return type(x) == "table" and type(x.timestamp) == "number"
      and options.count[2](x.input_length) and options.count[2](x.output_length)
      and type(x.hash_ids) == "table"
  end }
arguments.functions(M, "trace", {
  read = { path = options.string, limit = options.optional(options.whole) },
  write = { path = options.string, rows = M.ROWS },
  submit = { server = options.like("a server", "scheduler", "submit"), rows = M.ROWS },
})

return M
