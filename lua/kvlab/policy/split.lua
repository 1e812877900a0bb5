--- Splits: how a budget is divided among layers, or among the KV heads of a layer. A
-- split is a file in a folder called splits (kvlab.named).
--
--   kv.policy("quest", { ratio = 0.1, split = "pyramid" })
--   kv.policy("quest", { ratio = 0.1, split = kv.split("adaptive", { floor = 0.5 })
-- })
--
--   kv.split.define {
--     name = "pyramid",
--     defaults = { beta = 20 }             its options, numbers, texts, true or false
--     takes = { beta = kv.policy.count }   which values an option may have, if its type
--                                          is not enough
--     layers(self, mean, most, count)      once, when the policy is attached: a list of
--                                          `count` numbers, of 0 ... most each, whose
--                                          mean is `mean`. They are ratios, or blocks
--                                          beside those of min_blocks, sink and recent
--     heads(self, ctx, scores, even, budget)
--                                          whenever the policy selects: how many blocks
--                                          each list may have, i32 [seqs, kv_heads].
--                                          scores: those of the policy, f32 [seqs,
--                                          kv_heads, width]. even: how many each list
--                                          would have without the split, i32 [seqs,
--                                          kv_heads]. budget: the layer's kvl_budget;
--                                          each list has its min_blocks, sink and recent
--                                          in any case. All are read only
--     helper(self, …) }                    functions of its own, under other names
--
-- A split has layers, heads or both. What heads returns stays on the device, so no step
-- waits for it. No list gets more than the sum of `even` over the layer, because this is
-- the width of the selection. Negative numbers, and numbers with a larger sum than
-- `even`, are refused on the CPU, where the host can read them without waiting, and on a
-- GPU with --check.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local files = require "kvlab.files"
local named = require "kvlab.named"
local options = require "kvlab.options"
local sources = require "kvlab.sources"
local words = require "kvlab.words"

local M = {}

---@class kvlab.Split
---@field name string
---@field files string[]  that it was made from: of its definition, and of its name
---@field layers function|nil
---@field heads function|nil
local Split = {}

local A_SPLIT = options.like("a split, as kv.split makes them", "make", "given")

--- The same split with the same options, without the state that it keeps for an
-- attention.
---@return kvlab.Split
function Split:again()
  options.argument("again", "self", self, A_SPLIT)
  return self.make(self.given)
end

local OF_TYPE = { number = options.number, boolean = options.boolean,
                  string = options.string }
local FIELDS = { name = options.required(options.string), defaults = options.table,
                 takes = options.table, layers = options.fn, heads = options.fn }

--- What the option `split` of a policy may be.
M.KIND = { "the name of a split, or one that kv.split makes", function(x)
  return type(x) == "string" or type(x) == "table" and x.again == Split.again
end }

--- Whether a field is a function of the split's own: its name is not that of layers or
-- heads, nor a misspelt one.
local function is_helper(key, value)
  if type(key) ~= "string" or type(value) ~= "function" or FIELDS[key] then
    return false
  end
  local _, distance = words.nearest(key, { "layers", "heads" })
  return distance > #key / 4
end

local function check_definition(def)
  local known = {}
  for key, kind in pairs(FIELDS) do known[key] = kind end
  for key, value in pairs(type(def) == "table" and def or {}) do
    if is_helper(key, value) then known[key] = options.fn end
  end
  options.check("split.define", def, known, 3)
  if not (def.layers or def.heads) then
    options.fail(("split %s has neither layers nor heads"):format(def.name), 3)
  end
  local takes = {}
  for key, value in pairs(def.defaults or {}) do
    takes[key] = (def.takes or {})[key] or OF_TYPE[type(value)] or options.fail(
      ("split %s: the default of %s is a %s, expected a number, a text, true or false")
        :format(def.name, tostring(key), type(value)), 3)
  end
  for key in pairs(def.takes or {}) do
    if not takes[key] then
      options.fail(("split %s: takes has %s, expected one of its defaults"):format(
        def.name, tostring(key)), 3)
    end
  end
  return takes
end

--- Makes a split from its definition, whose fields are listed at the head of this file.
-- Call the result with options to get one that a policy can have.
---@param def table
---@return fun(given?: table): kvlab.Split
function M.define(def)
  local takes, class = check_definition(def), { again = Split.again }
  local what = "split " .. def.name
  for key, value in pairs(def) do class[key] = value end
  class.files = { debug.getinfo(def.layers or def.heads, "S").source:match "^@(.*)$" }
  for _, path in ipairs(class.files) do sources.load(path) end
  class.__index = class
  function class.make(given)
    given = options.check(what, given, takes)
    local self = setmetatable({ given = given }, class)
    for _, values in ipairs { def.defaults or {}, given } do
      for key, value in pairs(values) do self[key] = value end
    end
    return self
  end
  return class.make
end

--- The names of all splits.
---@return string[]
function M.names() return named.list "splits" end

--- Makes a split by name, with options. Raises for an unknown name or option; the error
-- lists the known ones.
---@param name string
---@param given? table  its options
---@return kvlab.Split
local function open(name, given)
  local make, path = named.open("splits", "split", name, 3)
  if type(make) ~= "function" then
    options.fail(named.wrong(path, make, "what kv.split.define returns"))
  end
  local self = make(given)
  if type(self) ~= "table" or not M.KIND[2](self) then
    options.fail(("%s makes a %s, expected a split"):format(path, type(self)))
  end
  if files.real(path) ~= files.real(self.files[1] or "") then -- it is a split of another
                                                              -- file
    self.files = { path, unpack(self.files) }
  end
  return self
end

return constructor(M, arguments.of("split", open, { name = options.string,
  given = options.optional(options.table) }))
