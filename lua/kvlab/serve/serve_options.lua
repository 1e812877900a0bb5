--- The options of a server: their defaults, and what is wrong with them in words.
local nearest = require("kvlab.words").nearest
local sorted = require "kvlab.sorted"

local M = {}

local DEFAULTS = {
  max_seqs = 16, prefetch_ahead = 2, prefetch_workers = 4, max_pending_prefetch = 64,
  priority = "queue_position", late = "wait", watermark = 0.01, slo_us = 2e6,
}
local OTHERS = { engine = "table", store = "table", cost = "table", hooks = "table",
                 blocks = "number", block_size = "number", max_tokens = "number",
                 store_blocks = "number" }
local OF_POLICY = { "prefetch_ahead", "prefetch_workers", "max_pending_prefetch" }
local HOOKS = { build_sparse_meta = true, request_begin = true, request_finished = true,
                attention_begin = true, attention_finished = true }

local function wrong(name, value, expected)
  error(("serve: %s is %s, expected %s"):format(name, tostring(value), expected), 4)
end

local function check_names(o)
  local known = {}
  for name in pairs(DEFAULTS) do known[name] = true end
  for name in pairs(OTHERS) do known[name] = true end
  for name in pairs(o) do
    if not known[name] then
      error(("serve: nothing is called %s; did you mean %s? There is %s"):format(
        tostring(name), nearest(tostring(name), sorted.keys(known)),
        table.concat(sorted.keys(known), ", ")), 4)
    end
    if OTHERS[name] and type(o[name]) ~= OTHERS[name] then
      wrong(name, type(o[name]), "a " .. OTHERS[name])
    end
  end
  for name, hook in pairs(o.hooks or {}) do
    if not HOOKS[name] then
      wrong("hook " .. tostring(name), type(hook), "one of "
        .. table.concat(sorted.keys(HOOKS), ", "))
    elseif type(hook) ~= "function" then
      wrong("hook " .. name, type(hook), "a function")
    end
  end
end

local function check_values(o)
  local function whole(name, least)
    local value = o[name]
    if type(value) ~= "number" or value < least or value % 1 ~= 0 then
      wrong(name, value, "a whole number >= " .. least)
    end
  end
  if (o.engine == nil) == (o.cost == nil) then
    wrong("engine", type(o.engine) .. " and cost " .. type(o.cost),
      "one of engine (a model's) and cost (a model of costs)")
  end
  for _, name in ipairs { "max_seqs", "prefetch_workers", "max_pending_prefetch" } do
    whole(name, 1)
  end
  whole("prefetch_ahead", 0)
  whole("max_tokens", o.max_seqs)
  if o.cost then
    whole("blocks", 1)
    whole("block_size", 1)
    if o.store then wrong("store", "a store", "store_blocks: there is no memory") end
  else
    for _, name in ipairs { "blocks", "block_size", "store_blocks" } do
      if o[name] then wrong(name, o[name], "none: the engine has its cache") end
    end
  end
  if o.late ~= "wait" and o.late ~= "skip" then wrong("late", o.late, "wait or skip") end
  if not (o.watermark >= 0 and o.watermark < 1) then
    wrong("watermark", o.watermark, "a share of the blocks, 0 <= watermark < 1")
  end
end

--- The names of the priorities in lua/priorities/.
function M.priorities()
  local names, root = {}, require("kvlab.library").paths.root
  local list = io.popen(('ls "%s/lua/priorities" 2>/dev/null'):format(root))
  for file in list:lines() do names[#names + 1] = file:match "^([%w_]+)%.lua$" end
  list:close()
  return names
end

--- A priority: a function as it is, a name from lua/priorities/.
local function open_priority(given)
  if type(given) == "function" then return given end
  local names = M.priorities()
  for _, name in ipairs(names) do
    if name == given then return require("priorities." .. name) end
  end
  error(("serve: no priority \"%s\"; did you mean \"%s\"? There are %s"):format(
    tostring(given), nearest(tostring(given), names) or "",
    table.concat(names, ", ")), 4)
end

--- The options of kv.serve: defaults with `given` over them, checked; priority is a
-- function.
function M.take(given)
  if type(given) ~= "table" then wrong("the argument", type(given), "a table") end
  check_names(given)
  local o = {}
  for name, value in pairs(DEFAULTS) do o[name] = value end
  if given.engine then
    o.max_seqs, o.max_tokens = given.engine.max_seqs, given.engine.chunk
    local policy = given.engine.attention.decode_policy
    for _, name in ipairs(OF_POLICY) do o[name] = policy[name] or o[name] end
  else
    o.max_tokens, o.store_blocks = 8192, 0
  end
  for name, value in pairs(given) do o[name] = value end
  check_values(o)
  o.priority = open_priority(o.priority)
  return o
end

return M
