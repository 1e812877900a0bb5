--- The policy contract: what a policy may define, the options every policy has, and the
-- budget. Policies are files in lua/policies/; `kv.policy.open "quest"` makes one.
--
--   kv.policy.define {
--     name = "quest",
--     prefill = false, decode = true       the phases in which it may select
--     defaults = { ratio = 0.1, sink = 1 } its options; no others are taken
--     init(self, shape)                    once, when attached: make summaries. shape has
--                                          device, layers, blocks, block_size, heads,
--                                          kv_heads, head_dim, dtype
--     on_prefill_offload(self, ev)         K of some blocks is complete on the device:
--     on_decode_offload(self, ev)          ev.layer; ev.blocks i32 [n], the physical
--                                          blocks, as block tables name them; ev.k, the
--                                          memory that has them now, on the device, at
--                                          ev.k_blocks i32 [n]; ev.num_tokens i32 [n]
--                                          (valid tokens of each). With KV in host memory
--                                          this is before they leave the device
--     score(self, ctx)                     f32 [seqs, kv_heads or 1, ctx.width], higher
--                                          is better; ctx.scores is a buffer to write
--     select_blocks(self, ctx)             selection i32 [seqs, kv_heads or 1, n] and
--                                          counts, or nil for every block. Default:
--                                          sink, recent and the best scores within the
--                                          budget
--     compute_decode(self, attention, ctx, out)
--     compute_prefill(self, attention, ctx, out)
--                                          another dataflow; returns out, selection,
--                                          counts. Default: attend over the selection
--     attention_begin(self, ctx)           before and after each layer
--     attention_finished(self, ctx)
--     request_begin(self, seq)             per-sequence state is kept in
--     request_finished(self, seq)          seq.state[self.name], never on the policy
--     score_bytes(self, shape)             bytes read per block and KV head to score it;
--                                          for reports (0)
--     reset(self) }                        forget everything
--
-- Options of every policy: the budget, one of ratio (share of a sequence's blocks),
-- tokens or blocks; min_blocks, sink and recent (blocks always selected, within the
-- budget).
local ffi = require "ffi"
local library = require "kvlab.library"
local nearest = require "kvlab.nearest"

local C = library.C
local M = {}

local BUDGETS = { ratio = true, tokens = true, blocks = true }
local COMMON = { min_blocks = 0, sink = 0, recent = 0 }
local FUNCTIONS = {
  init = true, on_prefill_offload = true, on_decode_offload = true, score = true,
  select_blocks = true, compute_decode = true, compute_prefill = true,
  attention_begin = true, attention_finished = true, request_begin = true,
  request_finished = true, score_bytes = true, reset = true,
}
local FIELDS = { name = "string", prefill = "boolean", decode = "boolean",
                 defaults = "table" }

local Policy = {}

function Policy.select_blocks(self, ctx)
  return ctx:select(self:score(ctx), self.budget)
end
function Policy.compute_decode(self, attention, ctx, out)
  local selection, counts = self:select_blocks(ctx)
  return attention:over(selection, ctx, out), selection, counts
end
Policy.compute_prefill = Policy.compute_decode
function Policy.score_bytes() return 0 end

-- ---- options --------------------------------------------------------------------------

local function check_value(policy, key, value, default, level)
  local function wrong(expected)
    error(("policy %s: %s is %s, expected %s"):format(policy, key, tostring(value),
      expected), level + 1)
  end
  if key == "ratio" then
    if type(value) ~= "number" or not (value >= 0 and value <= 1) then wrong "0 ... 1" end
  elseif BUDGETS[key] or COMMON[key] then
    if type(value) ~= "number" or value < 0 or value % 1 ~= 0 then
      wrong "a whole number >= 0"
    end
  elseif type(value) ~= type(default) then
    wrong("a " .. type(default))
  end
end

--- Defaults with `given` over them; a given budget replaces the default one.
local function merge_options(def, given, level)
  local options, known = {}, {}
  for key, value in pairs(COMMON) do options[key], known[key] = value, value end
  for key in pairs(BUDGETS) do known[key] = 0 end
  for key, value in pairs(def.defaults) do options[key], known[key] = value, value end
  local budget
  for _, key in ipairs(nearest.keys(given)) do
    if known[key] == nil then
      error(("policy %s has no option \"%s\"; did you mean \"%s\"? It has %s"):format(
        def.name, tostring(key), nearest.find(tostring(key), nearest.keys(known)),
        table.concat(nearest.keys(known), ", ")), level + 1)
    end
    check_value(def.name, key, given[key], def.defaults[key], level + 1)
    if BUDGETS[key] then
      if budget then
        error(("policy %s: both %s and %s are given, expected one budget"):format(
          def.name, budget, key), level + 1)
      end
      budget = key
      for other in pairs(BUDGETS) do options[other] = nil end
    end
    options[key] = given[key]
  end
  return options
end

--- The budget of some options as the library takes it, for blocks of `block_size` tokens.
local function make_budget(o, block_size)
  local blocks = o.blocks or (o.tokens and math.ceil(o.tokens / block_size)) or 0
  local all = not (o.ratio or o.tokens or o.blocks)
  return ffi.new("kvl_budget", all and 1 or o.ratio or -1, blocks, o.min_blocks, o.sink,
    o.recent)
end

--- The budget that allows every block.
M.everything = ffi.new("kvl_budget", 1, 0, 0, 0, 0)

--- Blocks that a budget allows of n.
function M.budget_blocks(budget, n)
  return library.check(C.kvl_budget_blocks(budget, n))
end

-- ---- define and open ------------------------------------------------------------------

local function check_definition(def)
  if type(def.name) ~= "string" then error("policy: name is missing", 3) end
  for key, value in pairs(def) do
    local want = FIELDS[key] or FUNCTIONS[key] and "function"
    if not want then
      error(("policy %s: unknown field \"%s\"; did you mean \"%s\"?"):format(def.name,
        tostring(key), nearest.find(tostring(key), nearest.keys(FUNCTIONS))), 3)
    elseif type(value) ~= want then
      error(("policy %s: %s is a %s, expected a %s"):format(def.name, key, type(value),
        want), 3)
    end
  end
  if not (def.prefill or def.decode) then
    error(("policy %s declares neither prefill nor decode"):format(def.name), 3)
  end
  if not (def.score or def.select_blocks or def.compute_decode) then
    error(("policy %s has none of score, select_blocks and compute_decode"):format(
      def.name), 3)
  end
end

--- Make a policy out of its definition. The result is called with options to get one to
-- attach: `local quest = require "policies.quest"; quest { ratio = 0.05 }`.
---@param def table
---@return function
function M.define(def)
  check_definition(def)
  def.defaults = def.defaults or {}
  local class = {}
  for key, value in pairs(Policy) do class[key] = value end
  for key, value in pairs(def) do class[key] = value end
  class.__index = class
  return function(given)
    local options = merge_options(def, given or {}, 2)
    local self = setmetatable(options, class)
    self.options = nearest.keys(options)
    return self
  end
end

--- Bind a policy to the shape it works on. attention.lua calls this once.
function M.attach(self, shape)
  if self.shape then
    error(("policy %s is attached already; make another one"):format(self.name), 3)
  end
  self.shape = shape
  self.budget = make_budget(self, shape.block_size)
  if self.init then self:init(shape) end
  return self
end

--- The names of the policies in lua/policies/; with a phase, prefill or decode, of those
-- that select in it.
---@param phase? string
function M.names(phase)
  local names = {}
  local list = io.popen(('ls "%s/lua/policies" 2>/dev/null'):format(library.paths.root))
  for file in list:lines() do
    local name = file:match "^([%w_]+)%.lua$"
    if name and (not phase or require("policies." .. name)()[phase]) then
      names[#names + 1] = name
    end
  end
  list:close()
  return names
end

--- A policy by name with options. Unknown names and options are errors that list the
-- known ones.
---@param name string
---@param given? table
function M.open(name, given)
  local names = M.names()
  for _, known in ipairs(names) do
    if known == name then return require("policies." .. name)(given) end
  end
  error(("no policy \"%s\"; did you mean \"%s\"? There are %s"):format(tostring(name),
    nearest.find(tostring(name), names) or "", table.concat(names, ", ")), 2)
end

return M
