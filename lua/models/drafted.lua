--- The tokens of a draft, on the device of an engine: step by step, the ids that a step
-- made for its sequences. The next step and the step that verifies the draft read them
-- there, so the host need not know them. A step that takes the likeliest tokens finds on
-- the device, too, where its ids belong, so that one graph serves all steps of a draft.
local kv = require "kvlab"

local M = {}

---@class models.Drafted
---@field ids kvlab.Tensor  i32 [steps, most sequences of a step]
local Drafted = {}
Drafted.__index = Drafted

local MOST_PLACES = 256 -- of batches whose places are kept
local ROOM = 128 -- steps that there is room for, unless a draft has more

---@param device kvlab.Device
---@param max_seqs integer
---@return models.Drafted
function M.new(device, max_seqs)
  return setmetatable({ device = device, max_seqs = max_seqs, rows = {}, steps = {},
    places = {}, kept = 0, columns = kv.arange(device, "i32", max_seqs),
    newest = kv.zeros(device, "i32", { max_seqs }),
    at = kv.zeros(device, "i32", { max_seqs }) }, Drafted)
end

--- Begins a draft of at most `steps` steps.
function Drafted:begin(steps)
  if not self.ids or self.ids:size(0) < steps then
    steps = math.max(steps, ROOM)
    local ids = kv.lasting(kv.zeros, self.device, "i32", { steps, self.max_seqs })
    self.flat, self.rows = kv.lasting(ids.reshape, ids, { 1, steps * self.max_seqs }), {}
    self.ids = ids -- set last, because an interrupt may come between any two
  end
  self.at:copy_(self.columns)
end

local function narrow_row(self, at, n) return self.ids:index(at - 1):narrow(0, n) end

--- The ids of the first n sequences of step `at`, counted from 1: i32 [n].
function Drafted:row(at, n)
  local key = at * 2 ^ 24 + n
  local row = self.rows[key]
  if not row then
    row = kv.lasting(narrow_row, self, at, n)
    self.rows[key] = row
  end
  return row
end

local function narrow_step(self, n)
  local tokens, at = self.newest:narrow(0, n), self.at:narrow(0, n)
  return { tokens = tokens, tokens_row = tokens:reshape { 1, n }, at = at,
           at_row = at:reshape { 1, n } }
end

--- What a step of n sequences reads and writes: `tokens`, i32 [n], which it computes.
function Drafted:step(n)
  local step = self.steps[n]
  if not step then
    step = kv.lasting(narrow_step, self, n)
    self.steps[n] = step
  end
  return step
end

--- Makes the likeliest tokens those of this step; the next step computes them. This may
-- be recorded, because the index among the ids is on the device.
function Drafted:take_likeliest(logits, n)
  local step = self:step(n)
  logits:argmax(step.tokens)
  self.flat:scatter_(step.at_row, step.tokens_row)
  step.at:add(self.max_seqs, step.at)
end

--- The next step has only those of `previous` sequences that are in `rows`, counted from
-- 0.
function Drafted:keep_rows(previous, rows)
  local index = kv.from(self.device, "i32", { 1, #rows }, rows)
  self:step(#rows).tokens_row:copy_(self:step(previous).tokens_row:gather(index))
end

--- Where the drafts' tokens are, and which rows of the step that verifies them they get:
-- i32 [1, n] each.
local function make_places(self, counts, drafted)
  local from, to, row, columns = {}, {}, 0, {}
  for i = 1, #counts do
    for t = 1, drafted[i] do
      local column = columns[t] or 0 -- sequences of step t before this one
      from[#from + 1], to[#to + 1] = (t - 1) * self.max_seqs + column, row + t
      columns[t] = column + 1
    end
    row = row + counts[i]
  end
  return { from = kv.from(self.device, "i32", { 1, #from }, from),
           to = kv.from(self.device, "i32", { 1, #to }, to) }
end

--- Writes the drafts to the tokens of the step that verifies them, i32 [n].
---@param counts integer[]   tokens of the step, of each sequence
---@param drafted integer[]  how many of them are of a draft of these steps
function Drafted:put(counts, drafted, tokens)
  local key = table.concat(counts, " ") .. ": " .. table.concat(drafted, " ")
  local places = self.places[key]
  if not places then
    if self.kept == MOST_PLACES then self.places, self.kept = {}, 0 end
    places = kv.lasting(make_places, self, counts, drafted)
    self.places[key], self.kept = places, self.kept + 1
  end
  tokens:reshape { 1, tokens:size(0) }:scatter_(places.to, self.flat:gather(places.from))
end

return M
