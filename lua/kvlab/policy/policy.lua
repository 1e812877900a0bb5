--- The policy contract: what a policy may define, the options every policy has, and the
-- budget. Policies are files in folders called policies (kvlab.named): the project's
-- lua/policies, ./policies, and those of --path and KVLAB_PATH. `kv.policy "quest"` makes
-- one.
--
--   kv.policy.define {
--     name = "quest",
--     prefill = false, decode = true       the phases in which it may select
--     defaults = { ratio = 0.1, sink = 1 } its options; no others are taken
--     takes = { window = policy.count }    which values an option may have, if its
--                                          type is not enough: share, whole, count,
--                                          within(1, 9), one_of(…), policy_name. A
--                                          server's clients may set a text only if it is
--                                          named here
--     aliases = { sparse_ratio = "ratio" } other names of options
--     init(self, shape)                    once, when attached: make summaries. shape has
--                                          device, layers, blocks, block_size, heads,
--                                          kv_heads, head_dim, dtype, max_blocks (of a
--                                          sequence), scale (of q . k), and index: heads
--                                          and dim, if the model has an indexer. A policy
--                                          that sets self.reads_index here gets what the
--                                          indexer made (see Attention:forward), in
--                                          ctx.index and ev.index, and the places of its
--                                          keys in ev.places
--     on_prefill_offload(self, ev)         the K of some blocks is complete on the
--                                          device:
--     on_decode_offload(self, ev)          ev.layer; ev.blocks i32 [n]: the physical
--                                          blocks, as block tables name them; ev.k: the
--                                          device memory that holds them now, at
--                                          ev.k_blocks i32 [n]; ev.num_tokens i32 [n]:
--                                          the valid tokens of each; ev.turns: how many
--                                          of them the step began or filled. If KV lies
--                                          in host memory, this runs before the blocks
--                                          leave the device
--     summary = { name = expression }      what is kept of each block, see kvlab.kernel;
--                                          self.summary.name:layer(i) is its tensor.
--                                          summary(options) returns such a table, for
--                                          expressions whose form depends on an option
--     score = expression                   in place of a function
--     score(self, ctx)                     f32 [seqs, kv_heads or 1, ctx.width], higher
--                                          is better; ctx:new_scores() gives a tensor to
--                                          write to
--     bias = expression                    added to the score of each query and key in
--                                          attention, before the softmax
--     mask = expression                    false: the query does not see the key
--     log_weight = expression              the key counts e^log_weight times
--     emit = { name = expression }         what is made of the weights of each block that
--                                          was read: self.emitted.name, f32 [seqs,
--                                          kv_heads, width], until the layer is over; of
--                                          an expression with the dimension token, f32
--                                          [seqs, kv_heads, width * block_size]. A
--                                          prefill gives the sum over the chunk's
--                                          queries, each as in a decode step of its own,
--                                          or after max "query" the maximum. It does so
--                                          for the policy that selects in it, and for one
--                                          that watches the prompt (watches_prompt). 0
--                                          where nothing was read; -inf of a maximum
--     name = kv.kernel.map(fn)             an expression over scores and tallies, which
--                                          self:name(ctx, …) computes
--     evict(self, ctx)                     the worth of each token that is held, f32
--                                          [seqs, kv_heads or 1, width * block_size];
--                                          nil where the oldest goes first. Tokens are
--                                          evicted for good, see policy/evictor.lua; the
--                                          budget then says how many are held
--     prompt_only = true                   it evicts at the end of a prompt alone, and
--                                          decoded tokens stay. Such a policy may select,
--                                          too: kv.policy.hold, called in init, then says
--                                          what is held, and the budget what is read
--     select_blocks(self, ctx)             selection i32 [seqs, kv_heads or 1, n] and
--                                          counts, or nil for every block. Default:
--                                          sink, recent and the best scores within the
--                                          budget
--     select_tokens(self, ctx)             where by_token is set, in place of
--                                          select_blocks: the tokens that each row of
--                                          ctx.query reads, see Attention:over_tokens
--     by_token = true                      it selects tokens. A function gets the options
--     predict(self, ctx)                   a guess of the selection that a coming decode
--                                          step will make, or nil. Where blocks come
--                                          through a hot cache, it is called after each
--                                          layer of a decode step and of the chunk that
--                                          ends a prompt (ctx.is_prefill), and the hot
--                                          cache brings the blocks ahead. No result
--                                          depends on it
--     compute_decode(self, attention, ctx, out)
--     compute_prefill(self, attention, ctx, out)
--                                          replaces the attention; returns out,
--                                          selection, counts, or out, nil, nil, listed
--                                          of tokens. Default: attend over the
--                                          selection
--     step_begin(self, ctx)                once a step of its phase, before the layers,
--                                          also when a graph replays the layers; and once
--                                          a prefill step in which it emits, because it
--                                          watches the prompt
--     attention_begin(self, ctx)           before and after each layer of both phases
--     attention_finished(self, ctx)
--     request_begin(self, seq)             keep the state of a sequence in
--     request_finished(self, seq)          seq.state[self] or a kv.tally, never on the
--     inherit(self, seq, fork)             policy; inherit: seq, with state, was forked
--                                          If a step fails, seq.state[self] is restored.
--                                          Tables in it are copied, so a step may change
--                                          them; tensors are not copied, so a step must
--                                          replace them, and neither write to the old
--                                          ones nor free them
--     take_back(self, seq, tokens)         so many of the newest tokens of seq, which a
--                                          decode step of several gave it, were taken
--                                          back: mend seq.state[self] if it depends on
--                                          them (a tally does that by itself)
--     keep_block(self, key, block, store)  a full block goes to a store, under the key of
--                                          its content
--     recall_block(self, key, block, store)
--                                          that content is in this physical block now:
--                                          return true if the policy restored what it
--                                          knew of it; otherwise it is shown the K, as in
--                                          a prefill
--     find_blocks(self, store, keys, n)    of how many of the first n keys, without a
--                                          gap, recall_block would find what it needs in
--                                          the store. A policy that watches "blocks" and
--                                          lacks it is given no blocks of a store
--     dense = true                         it always selects every block, so attention in
--                                          prefill may have another form (expansion.lua)
--     takes_less = true                    it may select fewer blocks than its budget
--     complete = { p = 1 }                 options with which, and with the whole budget,
--                                          its output is that of dense attention; false:
--                                          it never is (what a policy with a bias, a
--                                          mask or a log_weight is, unless it says more)
--     own_bytes = 0                        bytes that it reads of tensors of its own for
--                                          each block and KV head, in a layer in which it
--                                          scores or selects: a number, or
--                                          own_bytes(self, shape, layer). What kvlab's
--                                          objects read is counted anyway
--                                          (policy/reads.lua). A policy with functions
--                                          that run in decode steps and without own_bytes
--                                          is uncounted: it takes part in no comparison
--     watches_prompt = true                it needs the prompt's queries, or what their
--                                          attention emits, so it cannot be attached
--                                          after the prefill. "blocks": all that it makes
--                                          of them belongs to blocks, so sequences may
--                                          share those that its steps computed. A
--                                          function gets the options
--     eager = true                         its Lua decides at each step what to launch,
--                                          so no graph can record it
--     reset(self)                          forget everything
--     helper(self, …) }                    functions of its own, under other names
--
-- A decode step may have several new tokens for a sequence. To a policy, each of them is
-- a sequence of its own, with one query and the length up to it; ctx.sequences then has
-- views of the sequence, and seq.base is the sequence itself (memory/rows.lua).
--
-- A policy may make drafts (attention's draft_policy): self.drafts is then true. It is
-- called in prefill steps like any other policy, and in its own steps, which look like
-- decode steps of several tokens, with one token for each sequence. Of other decode
-- steps, also before the first draft, it sees only the K (on_decode_offload). So it sees
-- the K of a draft's tokens twice: from the draft, and from the step that verified it.
--
-- Options of every policy: the budget, given as one of ratio (share of a sequence's
-- blocks), tokens or blocks, each a number, a list by layer or a tensor [layers,
-- kv_heads] (policy/budget.lua); split, which divides it (policy/split.lua);
-- min_blocks; sink and recent (blocks that are always selected; they count towards the
-- budget); and reuse_layers and reuse_steps: with n, the policy selects in every n-th
-- layer or decode step, and those between read its selection again (policy/kept.lua). If
-- the defaults have a seed, its value is that of --seed, or of the row that an experiment
-- computes, unless the caller of kv.policy gives one.
local arguments = require "kvlab.arguments"
local budgets = require "kvlab.policy.budget"
local command_line = require "kvlab.command_line"
local constructor = require "kvlab.constructor"
local expression = require "kvlab.kernel.expression.expression"
local ffi = require "ffi"
local formats = require "kvlab.memory.formats"
local kernel_hook = require "kvlab.kernel.run.hook"
local kernel = require "kvlab.kernel.run.kernel"
local library = require "kvlab.library"
local map = require "kvlab.kernel.run.map"
local named = require "kvlab.named"
local options = require "kvlab.options"
local objects = require "kvlab.memory.objects"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"
local splits = require "kvlab.policy.split"
local words = require "kvlab.words"

local C = library.C
local M = {}

-- What `takes` may say of an option: kinds of kvlab.options.
M.share, M.whole, M.count = options.share, options.whole, options.count
--- The option names a policy, which `nest` opens.
M.policy_name = { "the name of a policy", options.string[2] }
--- The option must be one of these texts.
function M.one_of(...) return options.one_of(...) end
--- The option is a whole number within limits.
function M.within(low, high) return options.within(low, high) end

local BUDGETS = budgets.AMOUNTS
local COMMON = { min_blocks = 0, sink = 0, recent = 0, reuse_layers = 1, reuse_steps = 1 }
local AN_EXPRESSION = { "an expression", expression.is_expression }
local FIELDS = {
  name = options.required(options.string), prefill = options.boolean,
  decode = options.boolean, defaults = options.table, takes = options.table,
  aliases = options.table, eager = options.boolean,
  watches_prompt = options.either(options.either(options.boolean,
    options.one_of("blocks")), options.fn),
  by_token = options.either(options.boolean, options.fn),
  dense = options.boolean, takes_less = options.boolean, prompt_only = options.boolean,
  own_bytes = options.either(options.not_negative, options.fn),
  summary = { "a table or a function", function(x)
    return type(x) == "table" or type(x) == "function"
  end },
  score = { "a function or an expression", function(x)
    return type(x) == "function" or expression.is_expression(x)
  end },
  complete = { "a table or false", function(x)
    return type(x) == "table" or x == false
  end },
  bias = AN_EXPRESSION, mask = AN_EXPRESSION, log_weight = AN_EXPRESSION,
  emit = options.table,
}
for _, name in ipairs {
  "init", "on_prefill_offload", "on_decode_offload", "select_blocks",
  "compute_decode", "compute_prefill", "attention_begin", "attention_finished",
  "request_begin", "request_finished", "reset", "step_begin", "inherit",
  "predict", "keep_block", "recall_block", "find_blocks", "take_back", "evict",
  "select_tokens",
} do
  FIELDS[name] = options.fn
end

---@class kvlab.Policy
local Policy = {}

-- The selection of a policy that only evicts: attention reads everything that is held.
local function select_all() return nil end

function Policy.select_blocks(self, ctx)
  return ctx:select(self:score(ctx), self.budget)
end
function Policy.compute_decode(self, attention, ctx, out)
  if self.by_token then
    local listed = self:select_tokens(ctx)
    return attention:over_tokens(listed, ctx, out), nil, nil, listed
  end
  local selection, counts = self:select_blocks(ctx)
  return attention:over(selection, ctx, out), selection, counts
end
Policy.compute_prefill = Policy.compute_decode

-- ---- options --------------------------------------------------------------------------

local OF_TYPE = { number = options.number, boolean = options.boolean,
                  string = options.string, table = options.table,
                  ["function"] = options.fn }

--- What the options of a definition may be, under their names and their aliases.
local function known_options(def)
  local known = {}
  for key, value in pairs(def.defaults) do known[key] = OF_TYPE[type(value)] end
  for key, kind in pairs(BUDGETS) do known[key] = kind end
  for key, least in pairs(COMMON) do known[key] = least == 1 and M.count or M.whole end
  if def.evict and not def.prompt_only then known.keep_decoded = options.boolean end
  known.split = splits.KIND
  for key, kind in pairs(def.takes) do
    local of_type = known[key]
    if of_type then
      known[key] = { kind[1], below = kind.below,
        function(x) return of_type[2](x) and kind[2](x) end }
    end
  end
  for alias, key in pairs(def.aliases) do
    if known[alias] or not known[key] then
      error(("policy %s: alias %s of %s, expected a new name for one of %s"):format(
        def.name, alias, tostring(key), table.concat(sorted.keys(known), ", ")), 4)
    end
  end
  for alias, key in pairs(def.aliases) do known[alias] = known[key] end
  return known
end

--- The defaults, replaced by `given` where it names an option; a given budget replaces
-- the default budget.
local function merge_options(def, given, level)
  local what = "policy " .. def.name
  given = options.check(what, given, def.known, level + 1)
  local merged, name_of, budget = {}, {}, nil
  for key, value in pairs(COMMON) do merged[key] = value end
  for key, value in pairs(def.defaults) do merged[key] = value end
  if merged.seed then merged.seed = seeds.current() end
  for _, name in ipairs(sorted.keys(given)) do
    local key = def.aliases[name] or name
    if name_of[key] then
      error(("%s: both %s and %s are given, which are the same option"):format(what,
        name_of[key], name), level + 1)
    end
    name_of[key] = name
    if BUDGETS[key] then
      if budget then
        error(("%s: both %s and %s are given, expected one budget"):format(what, budget,
          name), level + 1)
      end
      budget = name
      for other in pairs(BUDGETS) do merged[other] = nil end
      budgets.check_amount(what, key, given[name], name)
    end
    merged[key] = given[name]
  end
  if type(merged.split) == "string" then merged.split = splits(merged.split) end
  return merged
end

--- The budget that allows every block.
M.everything = ffi.new("kvl_budget", 1, 0, 0, 0, 0)

--- The budget that allows only the last n blocks.
function M.recent(n)
  options.argument("recent", "n", n, options.whole)
  return ffi.new("kvl_budget", -1, 0, 0, 0, n)
end

--- How many of n blocks a budget allows. If the budget differs among layers or heads,
-- this is the largest number of any head of a layer.
---@param layer? integer  of a budget that differs
function M.budget_blocks(budget, n, layer)
  options.argument("budget_blocks", "budget", budget, budgets.kind)
  options.argument("budget_blocks", "n", n, options.whole)
  return library.check(C.kvl_budget_blocks(budgets.of_layer(budget, layer), n))
end

--- The options that give a nested policy a share of the budget of `self`, or a multiple.
---@param self kvlab.Policy  attached
---@param share number       0 or more
---@return table  ratio, tokens or blocks
function M.part(self, share) return budgets.part(self, share) end

--- Why the budget of a policy does not decide what it reads of a sequence with n blocks:
-- sink, recent or min_blocks alone are more, or sink and recent leave nothing to choose.
local function beside_budget(self, n, block_size)
  local always, chooses = self.sink + self.recent, false
  for _, asked in ipairs(budgets.asked(self, block_size)) do
    local blocks = M.budget_blocks(asked, n)
    if blocks < math.min(math.max(self.min_blocks, always), n) then
      return "sink, recent and min_blocks alone are more than the budget"
    end
    chooses = chooses or always == 0 or blocks ~= always or blocks == n
  end
  if not chooses then return "sink and recent alone are the whole budget" end
end

-- The functions that run in a decode step and may read tensors that kvlab does not know.
local IN_STEPS = { "predict", "attention_finished", "attention_begin", "step_begin",
                   "evict", "compute_decode", "select_blocks", "select_tokens", "score" }

--- Says why it is not known how many bytes a policy reads in a decode step: it has
-- functions, and does not say what they read (own_bytes). nil: it is known.
---@param self kvlab.Policy
---@return string|nil
function M.uncounted(self)
  if self.step_function and not self.own_bytes then
    return ("uncounted: policy %s does not say what its %s reads (own_bytes)"):format(
      self.name, self.step_function)
  end
  for _, inner in ipairs(self.nested or {}) do
    local why = M.uncounted(inner)
    if why then return why end
  end
end

--- Says why a result of a policy cannot be compared with other results: what it read is
-- not counted, or its budget has no effect, because different budgets read the same. nil
-- if it can be compared. An experiment gives it to its rows as the metric `note`.
---@param self kvlab.Policy
---@param n integer   blocks of the sequence
---@param block_size integer  tokens
---@return string|nil
function M.note(self, n, block_size)
  options.argument("note", "self", self, objects.policy)
  options.argument("note", "n", n, options.whole)
  options.argument("note", "block_size", block_size, options.count)
  return M.uncounted(self) or beside_budget(self, n, block_size)
end

-- ---- define and open ------------------------------------------------------------------

--- Whether a field is a function or map of the policy's own: its name is not that of a
-- hook, nor a misspelt one.
local function is_helper(key, value)
  if type(key) ~= "string" then return false end
  if type(value) ~= "function" and not map.is_map(value) then return false end
  if FIELDS[key] then return false end
  local _, distance = words.nearest(key, sorted.keys(FIELDS))
  return distance > #key / 4
end

local function check_definition(def)
  local name = type(def) == "table" and def.name
  local what = type(name) == "string" and "policy " .. name or "policy"
  local known = {}
  for key, kind in pairs(FIELDS) do known[key] = kind end
  for key, value in pairs(type(def) == "table" and def or {}) do
    if is_helper(key, value) then known[key] = options.any end
  end
  if type(def) == "table" and def.score_bytes ~= nil then -- as in version 0.1
    error(what .. ": score_bytes is given, expected own_bytes: kvlab counts what its own "
      .. "objects read, and own_bytes what a policy reads of tensors of its own", 3)
  end
  options.check(what, def, known, 3)
  def.defaults, def.takes = def.defaults or {}, def.takes or {}
  def.aliases = def.aliases or {}
  for _, key in ipairs(sorted.keys(def.defaults)) do
    if def.defaults[key] ~= def.defaults[key] then
      error(("%s: the default of %s is nan, expected a number"):format(what, key), 3)
    end
  end
  if not (def.prefill or def.decode) then
    error(what .. " declares neither prefill nor decode", 3)
  end
  if not (def.score or def.select_blocks or def.select_tokens or def.compute_decode
    or def.evict) then
    error(what .. " has none of score, select_blocks, select_tokens, compute_decode and "
      .. "evict", 3)
  end
  if def.by_token and not def.select_tokens then
    error(what .. " has by_token, expected select_tokens beside it", 3)
  end
  if def.prompt_only and not def.evict then
    error(what .. " has prompt_only, expected evict beside it", 3)
  end
  local selects = def.score and "score" or def.select_blocks and "select_blocks"
  if def.evict and (def.prefill or not def.decode) then
    error(("%s has evict and %s, expected decode = true alone"):format(what,
      def.prefill and "prefill = true" or "no decode = true"), 3)
  elseif def.evict and selects and not def.prompt_only then
    error(("%s has evict and %s, expected prompt_only = true beside them: what makes way "
      .. "while it decodes is in the blocks that it selects"):format(what, selects), 3)
  end
  return { name = def.name, defaults = def.defaults, aliases = def.aliases,
           known = known_options(def) }
end

local function add_files(value, paths)
  if type(value) == "function" then
    local path = debug.getinfo(value, "S").source:match "^@(.*)$"
    if path then paths[path] = true end
  elseif map.is_map(value) then expression.add_files(value.expression, paths)
  elseif expression.is_expression(value) then expression.add_files(value, paths) end
end

--- The files that a definition's functions and expressions were written in.
local function files_of(def)
  local paths = {}
  for _, value in pairs(def) do add_files(value, paths) end
  for _, key in ipairs { "summary", "emit" } do
    local fields = type(def[key]) == "table" and def[key] or {}
    for _, value in pairs(fields) do add_files(value, paths) end
  end
  return sorted.keys(paths)
end

--- Notes that the policy takes part in the row that an experiment computes.
function M.note_use(self)
  for _, path in ipairs(self.files) do sources.use(path) end
end

--- The names of the options that are numbers, which expressions may read: as keys.
local function number_options(def)
  local numbers = {}
  for key, value in pairs(def.defaults) do
    if type(value) == "number" then numbers[key] = true end
  end
  for key in pairs(BUDGETS) do numbers[key] = true end
  for key in pairs(COMMON) do numbers[key] = true end
  return numbers
end

--- The definition with the fields of its summary, if these depend on options.
local function with_fields(def, o)
  if type(def.summary) ~= "function" then return def end
  local fields = def.summary(o)
  if type(fields) ~= "table" then
    error(("policy %s: summary returns %s, expected a table of expressions"):format(
      def.name, type(fields)), 0)
  end
  return setmetatable({ summary = fields }, { __index = def })
end

--- Makes functions of the kernels of a definition's expressions.
---@param defaults table  all options, as they are when none is given
local function use_expressions(class, def, defaults)
  local maps, inside = {}, {}
  for key, value in pairs(def) do
    if map.is_map(value) then maps[key], inside[key] = value, value.expression end
  end
  local numbers = number_options(def)
  local fields = kernel.check(with_fields(def, defaults), inside, numbers)
  class.expressions = { fields = fields, maps = maps, numbers = numbers }
  if kernel_hook.check(def, numbers) then class.expressions.attention = def end
  if (def.bias or def.mask or def.log_weight) and def.complete == nil then
    class.complete = false
  end
  if fields then
    class.summary = nil -- that of an attached policy holds its tensors
    for _, hook in ipairs { "on_prefill_offload", "on_decode_offload" } do
      local own = def[hook]
      class[hook] = function(self, ev)
        self.summary:update(ev)
        if own then own(self, ev) end
      end
    end
  end
  if expression.is_expression(def.score) then
    class.expressions.score, class.score = def.score, kernel.score
  end
end

local MADE = setmetatable({}, { __mode = "k" }) -- policy -> what made it, its options

--- Another policy of the same definition, with the same options, for another attention.
---@param self kvlab.Policy
---@return kvlab.Policy
function M.again(self)
  options.argument("again", "self", self, objects.policy)
  local made = MADE[self]
  return made.make(made.given)
end

--- A number, or a list of numbers, with all digits; any other value as it is printed.
local function exact(value)
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) ~= "table" or type(value[1]) ~= "number" then return tostring(value) end
  local list = {}
  for i, x in ipairs(value) do list[i] = exact(x) end
  return table.concat(list, ",")
end

--- A policy's name and options as a text: the same for policies that were made with the
-- same options. Objects among these are the same only if they are one.
---@param self kvlab.Policy
---@return string
function M.text(self)
  options.argument("text", "self", self, objects.policy)
  local given, parts = MADE[self].given or {}, { self.name }
  for _, name in ipairs(sorted.keys(given)) do
    parts[#parts + 1] = ("%s=%s"):format(name, exact(given[name]))
  end
  return table.concat(parts, " ")
end

--- What a policy's attention does besides attending over the selection; nil if nothing.
local function beside_list(self)
  return (self.compute_decode ~= Policy.compute_decode
    or self.compute_prefill ~= Policy.compute_prefill) and "a dataflow of its own"
    or self.expressions.attention and "a bias, a mask, a log_weight or emit" or nil
end

--- Why a policy's attention in decode is more than attention over the blocks that it
-- selects; nil if it is not.
---@param self kvlab.Policy
---@return string|nil
function M.beside_selection(self)
  options.argument("beside_selection", "self", self, objects.policy)
  return beside_list(self) or self.by_token and "lists of tokens" or nil
end

--- Raises for a policy whose selections are to be read again, but cannot be.
local function check_reuse(self)
  for _, name in ipairs { "reuse_layers", "reuse_steps" } do
    local more = self[name] > 1 and (beside_list(self)
      or self.evict and "evict, after which tokens have other numbers"
      or name == "reuse_steps" and not self.decode and "no decode = true")
    if more then
      options.fail(("policy %s: %s is %d, expected 1: the policy has %s"):format(
        self.name, name, self[name], more))
    end
  end
end

--- Makes a policy from its definition, whose fields are listed at the head of this file.
-- Call the result with options to get a policy that can be attached:
-- `local quest = require "policies.quest"; quest { ratio = 0.05 }`.
---@param def table
---@return fun(given?: table): table
function M.define(def)
  local checked = check_definition(def)
  local class = {}
  for key, value in pairs(Policy) do class[key] = value end
  for key, value in pairs(def) do class[key] = value end
  if def.evict and not (def.score or def.select_blocks) then
    class.select_blocks = select_all
  end
  for _, name in ipairs(IN_STEPS) do
    if type(def[name]) == "function" then class.step_function = name end
  end
  use_expressions(class, def, merge_options(checked, nil, 2))
  class.files = files_of(def)
  for _, path in ipairs(class.files) do sources.load(path) end
  class.__index = class
  local function make(given, level)
    local self = merge_options(checked, given, level or 2)
    self.options = sorted.keys(self)
    local own = {}
    for _, name in ipairs(self.options) do own[name] = self[name] end
    MADE[self] = { make = make, given = own }
    if self.split then
      self.files = { unpack(class.files) }
      for _, path in ipairs(self.split.files) do table.insert(self.files, path) end
    end
    if type(def.summary) == "function" then
      local fields = kernel.check(with_fields(def, self), {}, class.expressions.numbers)
      self.expressions = setmetatable({ fields = fields },
        { __index = class.expressions })
    end
    for _, name in ipairs { "watches_prompt", "by_token" } do
      if type(def[name]) == "function" then self[name] = def[name](self) end
    end
    check_reuse(setmetatable(self, class))
    M.note_use(self)
    return self
  end
  return make
end

--- Binds a policy to the shape that it works on. attention.lua calls this once.
function M.attach(self, shape)
  if self.shape then
    error(("policy %s is attached already; make another one"):format(self.name), 3)
  end
  shape.format = shape.format or formats.new({ format = shape.dtype,
    layers = shape.layers, kv_heads = shape.kv_heads, block_size = shape.block_size,
    head_dim = shape.head_dim }, 2)
  shape.dtype = shape.format.dtype
  self.shape = shape
  local by_head = (shape.cut_heads or 1) > 1
  if by_head and self.split and self.split.heads and not self.evict then
    options.fail(("policy %s: split %s divides a budget among heads, which does not go "
      .. "with tables by head"):format(self.name, self.split.name))
  end
  self.budget = budgets.make(self, shape)
  if self.init then self:init(shape) end
  if self.evict and self.select_blocks ~= select_all and not self.holder then
    options.fail(("policy %s evicts and selects, expected a call of kv.policy.hold in "
      .. "its init, which says what is held"):format(self.name))
  end
  kernel.attach(self, shape)
  kernel_hook.attach(self, shape)
  return self
end

--- Adds a policy and the policies with which it selects to a list.
function M.add_with_nested(self, list)
  list[#list + 1] = self
  for _, inner in ipairs(self.nested or {}) do M.add_with_nested(inner, list) end
end

--- Why the value of a policy's file makes no policies; nil if it does.
local function why_none(path, make)
  if type(make) == "function" then return nil end
  return named.wrong(path, make, "what kv.policy.define returns")
end

--- The policy of a file with its defaults; nil for a file that is not finished.
local function open_finished(name)
  local ok, made = pcall(function()
    local make, path = named.open("policies", "policy", name, 0)
    local why = why_none(path, make)
    return why and error(why, 0) or make()
  end)
  return ok and made or nil
end

local told = {} -- the names of files that were left out

--- Says once which files are not finished, unless the command line names the policies.
local function tell(broken)
  local names = {}
  for _, name in ipairs(broken) do
    if not told[name] then names[#names + 1] = name end
    told[name] = true
  end
  if not names[1] or command_line.worker or command_line.set.policy then return end
  io.stderr:write(("kvlab: not among the policies: %s (kvlab test policy %s says why)\n")
    :format(table.concat(names, ", "), names[1]))
end

--- Whether a policy takes part in a phase: it selects in prefill or in decode; evict: it
-- evicts tokens for good. A policy that evicts takes part in neither, because it needs
-- other tables.
local function has_phase(made, phase)
  if made.evict or phase == "evict" then return made.evict and phase == "evict" end
  return made[phase]
end

--- The names of all policies; if a phase is given, of those that take part in it. The
-- names in `first` come before the others.
---@param phase? string  prefill or decode: they select in it; evict: they evict
---@param first? string[]
function M.names(phase, first)
  local names, is_first, broken = {}, {}, {}
  for i, name in ipairs(first or {}) do names[i], is_first[name] = name, true end
  for _, name in ipairs(named.list "policies") do
    local made = not phase and {} or open_finished(name)
    if not made then broken[#broken + 1] = name end
    if not is_first[name] and made and (not phase or has_phase(made, phase)) then
      names[#names + 1] = name
    end
  end
  tell(broken)
  return names
end

--- Makes a policy by name, with options. Raises for an unknown name or option; the error
-- lists the known ones.
---@param name string
---@param given? table  its options
local function open(name, given, level)
  level = level or 2
  local make, path = named.open("policies", "policy", name, level)
  local why = why_none(path, make)
  if why then options.fail(("the policy %s: %s"):format(name, why), level + 1) end
  local self = make(given, level)
  if #self.files == 0 then -- such as one whose score is a leaf
    self.files = { path }
    M.note_use(self)
  end
  return self
end

--- Counts a nested policy's own bytes in the layers in which it scores or selects.
local function count_own(inner)
  for _, name in ipairs { "score", "select_blocks" } do
    local fn = inner[name]
    inner[name] = fn and function(self, ctx)
      if ctx.reads then ctx.reads:own(self, ctx) end
      return fn(self, ctx)
    end
  end
end

-- The hooks that are passed on to a nested policy.
local NESTED = { "on_prefill_offload", "on_decode_offload", "step_begin",
                 "attention_begin", "attention_finished", "request_begin",
                 "request_finished", "reset" }

--- Makes a policy a part of `outer`: its hooks are called with those of `outer`.
local function put_inside(outer, name, inner)
  if inner.expressions.attention then
    error(("policy %s: %s changes or reads the weights of attention, which only the "
      .. "attention's own policy can"):format(outer.name, name), 0)
  end
  outer.nested = outer.nested or {}
  outer.nested[#outer.nested + 1] = inner
  outer.files = { unpack(outer.files) }
  for _, path in ipairs(inner.files) do outer.files[#outer.files + 1] = path end
  M.attach(inner, outer.shape)
  if inner.own_bytes and inner.own_bytes ~= 0 then count_own(inner) end
  for _, hook in ipairs(NESTED) do
    local before = outer[hook]
    if inner[hook] then
      outer[hook] = function(self, argument)
        if before then before(self, argument) end
        inner[hook](inner, argument)
      end
    end
  end
  if inner.watches_prompt == true or not outer.watches_prompt then
    outer.watches_prompt = inner.watches_prompt
  end
  outer.reads_index = outer.reads_index or inner.reads_index
  outer.eager = outer.eager or inner.eager
  return inner
end

--- Makes the policy `name`, with which a decode policy selects. It has the budget of
-- `outer`, except for what `given` says, and its hooks are called with those of `outer`.
-- Call this in init.
---@param outer table
---@param name string
---@param given? table  options
---@return table
function M.nest(outer, name, given)
  local merged = { min_blocks = outer.min_blocks, sink = outer.sink,
                   recent = outer.recent }
  if not (given and (given.ratio or given.tokens or given.blocks)) then
    for key in pairs(BUDGETS) do merged[key] = outer[key] end
  end
  merged.split = outer.split
  for key, value in pairs(given or {}) do merged[key] = value end
  local inner = open(name, merged, 3)
  if not inner.decode or inner.by_token
    or inner.compute_decode ~= Policy.compute_decode then
    error(("policy %s: %s does not select blocks in decode, or has a dataflow of its own")
      :format(outer.name, name), 0)
  end
  if inner.evict then
    error(("policy %s: %s evicts tokens, expected one that selects, or kv.policy.hold")
      :format(outer.name, name), 0)
  end
  if inner.reuse_layers > 1 or inner.reuse_steps > 1 then
    error(("policy %s: %s has reuse_layers or reuse_steps, expected these of %s itself")
      :format(outer.name, name, outer.name), 0)
  end
  return put_inside(outer, name, inner)
end

--- Makes the policy `name`, which decides what is held, in place of `outer`. `outer` gets
-- the function evict of that policy, and may select among what is held. Call this in
-- init.
---@param outer table    its definition has evict; and prompt_only, if it selects
---@param name string    a policy with evict; and with prompt_only, if `outer` selects
---@param given? table   its options, the budget of what is held among them
---@return table
function M.hold(outer, name, given)
  local inner = open(name, given, 3)
  local selects = outer.select_blocks ~= select_all
  if not outer.evict or not inner.evict or selects and not inner.prompt_only then
    error(("policy %s: hold is given %s, expected two policies with evict%s"):format(
      outer.name, name, selects and ", and prompt_only, as it selects" or ""), 0)
  end
  outer.holder = put_inside(outer, name, inner)
  outer.evict = function(_, ctx) return inner:evict(ctx) end
  return inner
end

local NAMES = options.list_of(options.string)
local ATTACHED = { "a policy that is attached", function(x)
  return objects.policy[2](x) and x.shape ~= nil
end }
arguments.functions(M, "policy", {
  note_use = { self = objects.policy }, uncounted = { self = objects.policy },
  attach = { self = objects.policy, shape = objects.shape },
  add_with_nested = { self = objects.policy, list = options.table },
  names = { phase = options.optional(options.one_of("prefill", "decode", "evict")),
            first = options.optional(NAMES) },
  part = { self = ATTACHED, share = options.not_negative },
  nest = { outer = ATTACHED, name = options.string,
           given = options.optional(options.table) },
  hold = { outer = ATTACHED, name = options.string,
           given = options.optional(options.table) },
})

return constructor(M, arguments.of("policy", open, { name = options.string,
  level = options.optional(options.whole) }))
