--- The policies that requests name. Each policy with its options has an attention over
-- the engine's cache, which stays for later requests; if there are too many, the least
-- recently used are closed.
local AMOUNTS = require("kvlab.policy.budget").AMOUNTS
local draft_steps = require "kvlab.policy.draft_steps"
local fields = require "kvlab.http.fields"
local json = require "kvlab.json"
local named = require "kvlab.named"
local policies = require "kvlab.policy.policy"
local problem = require "kvlab.http.problem"
local rest = require("kvlab.slices").rest
local reuse = require "kvlab.policy.reuse"

local M = {}

local KB_STEP = 100 -- of the collector, between two rests

---@class kvlab.http.Policies
---@field most integer  how many are kept
local Policies = {}
Policies.__index = Policies

---@param engine table
---@param name string|nil     what requests get that name none; nil: the engine's own
---@param options table|nil   its options
---@param most integer        how many are kept at once
---@return kvlab.http.Policies
function M.new(engine, name, options, most)
  local self = setmetatable({ engine = engine, name = name, options = options or {},
    most = most, entries = {}, clock = 0 }, Policies)
  self.own = { attention = engine.attention, users = 0,
               name = name or engine.attention.decode_policy.name }
  if name then self.own.attention = engine:attention_of(policies(name, self.options)) end
  return self
end

--- Collects garbage in slices, twice: memory is freed in the cycle after its finalizers.
local function collect()
  for _ = 1, 2 do
    repeat rest() until collectgarbage("step", KB_STEP)
  end
end

--- Makes room for one more. Raises when all are in use.
local function make_room(self)
  local count, oldest = 0, nil
  for key, entry in pairs(self.entries) do
    count = count + 1
    if entry.users == 0 and (not oldest or entry.used < self.entries[oldest].used) then
      oldest = key
    end
  end
  if count < self.most then return end
  if not oldest then
    error(problem.new(429, (
      "requests with %d other policies are being served, which is as "
      .. "many as this server keeps; try again later"):format(count),
      { param = "policy", code = "too_many_policies", header = "Retry-After: 1" }), 0)
  end
  self.entries[oldest] = nil
  collect() -- its summaries may be large, and the collector does not see them
end

--- What a function makes of a policy. Raises the API's error if the function fails.
---@param field string        where it is named
---@param options table|nil   its options
local function made(field, options, make, ...)
  local ok, result = pcall(make, ...)
  if ok then return result end
  local words = tostring(result):gsub("^[^\n]-:%d+: ", "")
  problem.wrong(options and next(options) and field .. "_options" or field, words,
    "invalid_policy")
end

local function drafting(draft, options)
  local policy = draft_steps.expect_policy(policies(draft.policy, options))
  return draft.reuse and reuse.expect_policy(policy) or policy
end

--- Opens the attention of a policy, and of the policy of a draft with its options.
local function open(self, name, options, draft, of_draft)
  local drafts = draft and made("draft.policy", of_draft, drafting, draft, of_draft)
  return made("policy", options, function()
    return self.engine:attention_of(policies(name, options), drafts,
      draft and draft.reuse)
  end)
end

--- The options of a request, with the checks that the policy itself does not make. A
-- request may set numbers, true or false, a budget's list of numbers by layer, the name
-- of a split, and texts of which `takes` says what they may be. Other options are for
-- scripts: tables may hold tensors, and a text may be the path of a file.
---@param of string  the field that holds them
local function settable(of, name, given)
  local policy, out = policies(name), {}
  for key, value in pairs(given) do
    local field = of .. "." .. key
    local option = policy.aliases[key] or key
    local default = policy.defaults[option]
    local kind = type(default)
    if kind == "table" or kind == "function"
      or kind == "string" and not policy.takes[option] then
      problem.wrong(field, ("%s is an option that only scripts can set"):format(field),
        "unsupported_value")
    elseif type(value) == "table" and not (AMOUNTS[option] and value[1] ~= nil) then
      fields.refuse(field, value, "a number, a string, true or false")
    elseif value ~= json.null then
      out[key] = value
    end
  end
  return out
end

local function check_name(field, name)
  if named.path_of("policies", name) then return end
  problem.wrong(field, ("%s is %s, expected one of %s"):format(field,
    problem.quoted(name), table.concat(named.list "policies", ", ")), "unknown_policy")
end

--- Raises for a policy that evicts where the cache has one table for all.
local function expect_tables(self, name)
  if self.engine.cache.tables ~= "one" or not policies(name).evict then return end
  problem.wrong("policy", ("policy %s evicts tokens, which needs a cache with tables by "
    .. "layer or head, and this server's has one for all; a server has them that is "
    .. "started with a policy that evicts, or with engine.tables=head"):format(name),
    "invalid_policy")
end

--- The attention of the policies that a request names, opened where it is not there yet.
---@param draft table|nil  policy, policy_options
local function entry_of(self, name, given, is_own, draft)
  check_name("policy", name)
  expect_tables(self, name)
  given = settable("policy_options", name, given)
  local key = ("%s %s %s"):format(name, tostring(is_own), json.encode(given))
  local of_draft
  if draft then
    check_name("draft.policy", draft.policy)
    of_draft = settable("draft.policy_options", draft.policy, draft.policy_options or {})
    key = ("%s, drafts: %s %s %s"):format(key, draft.policy, tostring(draft.reuse),
      json.encode(of_draft))
  end
  local entry = self.entries[key]
  if entry then return entry end
  local all = {}
  for option, value in pairs(is_own and self.options or {}) do all[option] = value end
  for option, value in pairs(given) do all[option] = value end
  make_room(self)
  entry = { name = name, users = 0, attention = open(self, name, all, draft, of_draft) }
  self.entries[key] = entry
  return entry
end

--- Takes the policies that a request names; give() ends the use.
---@param name string|nil
---@param options table|nil  without a name: of the server's own policy, over its own
---@param draft table|nil    policy, policy_options: what makes the request's drafts
---@return table entry  attention, name
function Policies:take(name, options, draft)
  local entry = self.own
  if name or options or draft then
    local is_own = not name or name == self.own.name and not options
    entry = entry_of(self, name or self.own.name, options or {}, is_own, draft)
  end
  self.clock = self.clock + 1
  entry.users, entry.used = entry.users + 1, self.clock
  return entry
end

--- Called when a request no longer needs its policy.
function Policies.give(_, entry) entry.users = entry.users - 1 end -- luacheck: ignore 212

return M
