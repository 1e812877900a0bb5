--- The options of a server: their defaults, and the errors for wrong ones.
local cost_model = require "kvlab.serve.cost_model"
local draft = require "kvlab.serve.draft"
local named = require "kvlab.named"
local options = require "kvlab.options"
local sources = require "kvlab.sources"

local M = {}

local DEFAULTS = {
  max_seqs = 16, prefetch_ahead = 2, prefetch_workers = 4, max_pending_prefetch = 64,
  priority = "queue_position", late = "wait", watermark = 0.01, slo_us = 2e6,
}
local OF_POLICY = { "prefetch_ahead", "prefetch_workers", "max_pending_prefetch" }

local LIMIT = options.within(1, 2 ^ 24) -- of requests and tokens of a step

--- What the options of kv.serve may be.
M.KNOWN = {
  engine = options.like("a model's engine", "cache", "attention", "chunk"),
  store = options.like("a store", "url", "handle"), cost = options.table,
  hooks = options.table, draft = draft.KIND, blocks = options.count,
  block_size = options.count,
  max_seqs = LIMIT, max_tokens = LIMIT, keep = options.boolean,
  reserve = options.boolean,
  store_blocks = { "a number of blocks", function(x)
    return options.number[2](x) and x >= 0
  end },
  prefetch_ahead = options.whole, prefetch_workers = options.count,
  max_pending_prefetch = options.count, slo_us = options.not_negative,
  priority = options.either(options.string, options.callable),
  late = options.one_of("wait", "skip"),
  watermark = { "a share of the blocks, 0 <= watermark < 1", function(x)
    return options.share[2](x) and x < 1
  end },
}
local HOOKS = {
  build_sparse_meta = options.callable, request_begin = options.callable,
  request_finished = options.callable, attention_begin = options.callable,
  attention_finished = options.callable,
}

local function wrong(name, value, expected)
  options.fail(("serve: %s is %s, expected %s"):format(name, options.shown(value),
    expected))
end

--- Checks options that need or exclude other options.
local function check_together(o)
  if (o.engine == nil) == (o.cost == nil) then
    options.fail(("serve: engine is %s and cost is %s, expected one of engine (a "
      .. "model's) and cost (a model of costs)"):format(options.shown(o.engine),
      options.shown(o.cost)))
  end
  if o.max_tokens < o.max_seqs then
    wrong("max_tokens", o.max_tokens, "a whole number >= max_seqs = " .. o.max_seqs)
  end
  if o.cost then
    for _, name in ipairs { "blocks", "block_size" } do
      if not o[name] then wrong(name, o[name], M.KNOWN[name][1]) end
    end
    if o.store then wrong("store", o.store, "store_blocks, as there is no memory") end
    if o.draft then wrong("draft", o.draft, "none, as there is no model") end
  else
    if o.store and o.engine.cache.tables ~= "one" then
      wrong("store", o.store, ("none, as the engine's cache has tables by %s, and a "
        .. "store has blocks of all layers and heads"):format(o.engine.cache.tables))
    end
    local evictor = o.engine.attention.evictor
    if o.draft and evictor then
      wrong("draft", o.draft, ("none, as policy %s evicts tokens"):format(
        evictor.policy.name))
    end
    local tokens = o.draft and o.draft.policy and o.draft.tokens
    if type(tokens) == "number" and tokens >= o.max_tokens then
      wrong("draft.tokens", tokens, ("at most %d: a step has room for %d tokens "
        .. "(max_tokens)"):format(o.max_tokens - 1, o.max_tokens))
    end
    for _, name in ipairs { "blocks", "block_size", "store_blocks" } do
      if o[name] then wrong(name, o[name], "none, as the engine has a cache") end
    end
  end
end

--- The names of the priorities.
function M.priorities() return named.list "priorities" end

--- Opens a priority: a function is used as it is, a name is looked up as a file.
local function open_priority(given)
  if type(given) ~= "string" then return given end
  local priority, path = named.open("priorities", "priority", given, 4)
  if not options.callable[2](priority) then
    options.fail(named.wrong(path, priority, "a function of a request and a view"), 5)
  end
  sources.use(path)
  return priority
end

--- Raises for a priority that a server cannot have.
function M.check_priority(given) open_priority(given) end

--- The options of kv.serve, checked: the defaults, replaced by what `given` has. priority
-- becomes a function.
function M.take(given)
  given = options.check("serve", given, M.KNOWN, 3)
  options.check("serve.hooks", given.hooks, HOOKS, 3)
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
  check_together(o)
  if o.cost then o.cost = cost_model(o.cost, 4) end
  o.priority = open_priority(o.priority)
  return o
end

return M
