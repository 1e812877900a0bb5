--- Transformer and paged-attention ops as plain functions over tensors. runtime/kvlab.h
-- states shapes, dtypes and errors. Where `out` may be nil, the op makes a new tensor.
--
-- Ops that take a table check the names and types in it, which costs some microseconds
-- and ends a LuaJIT trace. `kv.ops.step` has the same ops without that check, for code
-- that runs in every step: `kv.ops.step.paged_attention(a)`.
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local argument, expect_tensor = options.argument, tensor.expect
local a_tensor, needed = kinds.tensor, options.required(kinds.tensor)
local NUMBER = options.optional(options.number)
local CONTEXT = { "a context of an attention", function(x)
  return type(x) == "table" and tensor.is_tensor(x.tables) and tensor.is_tensor(x.lens)
    and type(x.new_scores) == "function"
end }
local SUMMARY = { "a summary", function(x)
  return type(x) == "table" and type(x.layer) == "function"
end }
local HASHES = { "hashes, as kv.hash.summary makes them", function(x)
  return type(x) == "table" and tensor.is_tensor(x.planes) and type(x.layer) == "function"
end }
local FORM = options.one_of("plain", "add", "swiglu")
local FORMAT = kinds.format
local step = {}
local M = { step = step }

--- A summary's entries for the context's layer. The op is about to read the entries of
-- all blocks, so these are counted.
local function layer_of(what, summary, ctx)
  local entries = summary:layer(ctx.layer)
  expect_tensor(what, "the layer of the summary", entries)
  if ctx.reads then ctx.reads:entries(ctx, entries) end
  return entries
end

--- x / rms(x) * weight. If a residual is given, residual += x comes first, and the sum is
-- what is normalised. If weight is shorter than a row, only the first numbers of a row
-- are normalised, and out must be x.
function M.rmsnorm(x, weight, eps, out, residual)
  expect_tensor("rmsnorm", "x", x)
  expect_tensor("rmsnorm", "weight", weight)
  argument("rmsnorm", "eps", eps, options.number)
  if out ~= nil then expect_tensor("rmsnorm", "out", out) end
  if residual ~= nil then expect_tensor("rmsnorm", "residual", residual) end
  out = out or tensor.open_like(x)
  check(C.kvl_rmsnorm(x, residual, weight, eps, out))
  return out
end

--- (x - its mean) / its standard deviation * weight + bias, in each row.
function M.layernorm(x, weight, bias, eps, out)
  expect_tensor("layernorm", "x", x)
  expect_tensor("layernorm", "weight", weight)
  expect_tensor("layernorm", "bias", bias)
  argument("layernorm", "eps", eps, options.number)
  if out ~= nil then expect_tensor("layernorm", "out", out) end
  out = out or tensor.open_like(x)
  check(C.kvl_layernorm(x, weight, bias, eps, out))
  return out
end

--- A matrix for each head: x [tokens, heads, k + rest] times weight [heads, k, n], or
-- [heads, n, k] if is_transposed. The numbers of x behind the first k follow unchanged.
---@param out kvlab.Tensor  [tokens, heads, n + rest]
function M.head_matmul(x, weight, out, is_transposed)
  expect_tensor("head_matmul", "x", x)
  expect_tensor("head_matmul", "weight", weight)
  expect_tensor("head_matmul", "out", out)
  if is_transposed ~= nil then
    argument("head_matmul", "is_transposed", is_transposed, options.boolean)
  end
  check(C.kvl_head_matmul(x, weight, is_transposed and 1 or 0, out))
  return out
end

local FORMS = { plain = C.KVL_LINEAR_PLAIN, add = C.KVL_LINEAR_ADD,
                swiglu = C.KVL_LINEAR_SWIGLU }
local MOST_PARTS = 5
local PARTS = ffi.new("const kvl_tensor *[?]", MOST_PARTS)

--- Puts the tensors of a list into PARTS; returns how many they are.
local function parts_of(list, form)
  if form ~= "plain" then
    options.fail(("linear: out is a list, expected a tensor for form %q"):format(form))
  end
  if #list < 1 or #list > MOST_PARTS then
    options.fail(("linear: out has %d tensors, expected 1 to %d"):format(#list,
      MOST_PARTS))
  end
  for i, x in ipairs(list) do
    expect_tensor("linear", ("out[%d]"):format(i), x)
    PARTS[i - 1] = x
  end
  return #list
end

--- A projection y = h @ weight^T + bias with what belongs to it, in one op. h is x, or
-- with a norm rmsnorm(x, norm, eps). out becomes y (form "plain"), out + y ("add"), or
-- silu(first half of y) * its second half ("swiglu", with two rows of weight for each
-- output). x is [rows, k], weight [n, k], out [rows, n], or [rows, n / 2] for swiglu. In
-- the plain form `out` may be a list of up to five tensors: the first takes the first
-- columns of y, the second the next, and so on. That is how one call makes q, k and v.
function M.linear(x, weight, out, form, norm, eps, bias)
  expect_tensor("linear", "x", x)
  expect_tensor("linear", "weight", weight)
  local number = FORMS[form]
  if not number then argument("linear", "form", form, FORM) end
  if norm ~= nil then expect_tensor("linear", "norm", norm) end
  if norm ~= nil or eps ~= nil then argument("linear", "eps", eps, options.number) end
  if bias ~= nil then expect_tensor("linear", "bias", bias) end
  if type(out) == "table" then
    local parts = parts_of(out, form)
    check(C.kvl_linear_parts(x, norm, eps or 0, weight, bias, PARTS, parts))
  else
    expect_tensor("linear", "out", out)
    check(C.kvl_linear(x, norm, eps or 0, weight, bias, number, out))
  end
  return out
end

local FORM_OF_EXPERTS = options.one_of("plain", "add")
local FORMS_OF_EXPERTS = { plain = C.KVL_LINEAR_PLAIN, add = C.KVL_LINEAR_ADD }

local route = ffi.new "kvl_router"
local ROUTE = {
  logits = needed, bias = a_tensor, active = options.count, is_sigmoid = options.boolean,
  is_normed = options.boolean, groups = options.count, open_groups = options.count,
  factor = options.number, shared = options.whole, chosen = a_tensor, weights = a_tensor,
}

function step.route(a)
  local groups, shared, logits = a.groups or 1, a.shared or 0, a.logits
  local chosen, weights = a.chosen, a.weights
  if not (chosen and weights) then
    local given = chosen or weights
    local shape = given and given:dims() or { logits:size(0), (a.active or 1) + shared }
    chosen = chosen or tensor.tensor(logits.device, "i32", shape)
    weights = weights or tensor.tensor(logits.device, "f32", shape)
  end
  route.is_sigmoid, route.is_normed = a.is_sigmoid and 1 or 0, a.is_normed and 1 or 0
  route.groups, route.open_groups = groups, a.open_groups or groups
  route.shared, route.factor = shared, a.factor or 1
  check(C.kvl_route(logits, a.bias, route, chosen, weights))
  return chosen, weights
end

--- Chooses `active` experts for each row of logits [rows, experts], best first. A score
-- is the softmax over a row, or the sigmoid of each logit. A bias, f32 [experts], counts
-- for the choice only. Of equal experts the first wins. There are up to 4096.
---@param a table  logits; active (1), or chosen or weights, which say it; bias;
--                 is_sigmoid; is_normed: weights are divided by their sum; factor (1) of
--                 weights; groups (1) of neighbouring experts, of which the best
--                 open_groups (all) may be chosen from; shared (0): experts behind
--                 those of logits, which every row chooses, too, with weight 1; chosen;
--                 weights
---@return kvlab.Tensor chosen   i32 [rows, active + shared]
---@return kvlab.Tensor weights  f32 [rows, active + shared]
function M.route(a)
  options.check("route", a, ROUTE)
  if #a.logits:dims() ~= 2 then
    options.fail(("route: logits has %d dims, expected 2"):format(#a.logits:dims()))
  elseif a.active and (a.chosen or a.weights) then
    options.fail(("route: active is given with %s, expected one of them"):format(
      a.chosen and "chosen" or "weights"))
  end
  return step.route(a)
end

--- A layer of experts: y[r] = sum of weights[r][j] * what the expert chosen[r][j] gives
-- for x[r], which is down (silu(g) * u), where g and u are the halves of gate_up x[r].
-- out becomes y (form "plain", or nil) or out + y ("add"). Experts that no row has chosen
-- are not read, and a choice out of range adds nothing. x and out are [rows, k], chosen
-- i32 and weights f32 [rows, active], gate_up [experts, 2 * inner, k], down [experts, k,
-- inner], up to 4096 experts.
function M.experts(x, chosen, weights, gate_up, down, out, form)
  expect_tensor("experts", "x", x)
  expect_tensor("experts", "chosen", chosen)
  expect_tensor("experts", "weights", weights)
  expect_tensor("experts", "gate_up", gate_up)
  expect_tensor("experts", "down", down)
  if form == "add" or out ~= nil then expect_tensor("experts", "out", out) end
  local number = form == nil and C.KVL_LINEAR_PLAIN or FORMS_OF_EXPERTS[form]
  if not number then argument("experts", "form", form, FORM_OF_EXPERTS) end
  out = out or tensor.open_like(x)
  check(C.kvl_experts(x, chosen, weights, gate_up, down, number, out))
  return out
end

--- Rotates x [tokens, heads, head_dim] in place, from the number `first` (0) of each head
-- on.
function M.rope(x, positions, inv_freq, first)
  expect_tensor("rope", "x", x)
  expect_tensor("rope", "positions", positions)
  expect_tensor("rope", "inv_freq", inv_freq)
  if first ~= nil then argument("rope", "first", first, options.whole) end
  check(C.kvl_rope(x, positions, inv_freq, first or 0))
  return x
end

--- silu(gate) * up
function M.silu_mul(gate, up, out)
  expect_tensor("silu_mul", "gate", gate)
  expect_tensor("silu_mul", "up", up)
  if out ~= nil then expect_tensor("silu_mul", "out", out) end
  out = out or tensor.open_like(gate)
  check(C.kvl_silu_mul(gate, up, out))
  return out
end

--- cache[places[i]] = k[i], v[i]. k and v are [tokens, kv_heads, head_dim]; v is nil if
-- values are the first numbers of their keys. places, i64 [tokens], holds the place of
-- each token: block * block_size + offset, or -1 to skip it. cache is one layer's memory;
-- format says what its pages are (kv.format), if its shape does not.
function M.append_kv(k, v, places, cache, format)
  expect_tensor("append_kv", "k", k)
  if v ~= nil then expect_tensor("append_kv", "v", v) end
  expect_tensor("append_kv", "places", places)
  expect_tensor("append_kv", "cache", cache)
  if format ~= nil then argument("append_kv", "format", format, FORMAT) end
  check(C.kvl_append_kv(k, v, places, cache, format))
end

--- Rotates q in place, and k on its way into the cache, and appends k and v, which stay
-- as they are: rope and append_kv in one launch. Where values are the first numbers of
-- their keys, v is nil, and the numbers behind the values are rotated.
function M.rope_append(q, k, v, positions, inv_freq, places, cache, format)
  expect_tensor("rope_append", "q", q)
  expect_tensor("rope_append", "k", k)
  if v ~= nil then expect_tensor("rope_append", "v", v) end
  expect_tensor("rope_append", "positions", positions)
  expect_tensor("rope_append", "inv_freq", inv_freq)
  expect_tensor("rope_append", "places", places)
  expect_tensor("rope_append", "cache", cache)
  if format ~= nil then argument("rope_append", "format", format, FORMAT) end
  check(C.kvl_rope_append(q, k, v, positions, inv_freq, places, cache, format))
  return q
end

--- Copies whole blocks of a layer's memory. src and dst are i32 [n]; -1 is skipped.
function M.copy_blocks(src, dst, cache)
  expect_tensor("copy_blocks", "src", src)
  expect_tensor("copy_blocks", "dst", dst)
  expect_tensor("copy_blocks", "cache", cache)
  check(C.kvl_copy_blocks(src, dst, cache))
end

--- Reads the keys and values of blocks, i32 [n], out of a layer's memory: into k and v,
-- [n, kv_heads, block_size, head_dim] like cache, f32, f16 or bf16. Either may be nil. A
-- block -1 gives zeros. The numbers are those that are stored: scales of the format by KV
-- head are not applied.
function M.read_blocks(cache, blocks, k, v, format)
  expect_tensor("read_blocks", "cache", cache)
  expect_tensor("read_blocks", "blocks", blocks)
  if k ~= nil then expect_tensor("read_blocks", "k", k) end
  if v ~= nil then expect_tensor("read_blocks", "v", v) end
  if format ~= nil then argument("read_blocks", "format", format, FORMAT) end
  check(C.kvl_read_blocks(cache, format, blocks, k, v))
end

local call = ffi.new "kvl_attention"

--- The result of attention from q: as many numbers as a value has.
local function new_out(q, format)
  if not format or format.is_shared == 0 then return tensor.open_like(q) end
  return tensor.tensor(q.device, q:type(), { q:size(0), q:size(1), format.value_dim })
end

-- Attends from q. `of` has the arguments that are the same for all parts of a layer's
-- memory: tables, lens, starts, tree, alibi, window, soft_cap and scale. A context has
-- it.
function step.attend(of, q, cache, format, selection, slots, out, lse, prev, prev_lse,
                     is_past, hook, scores, listed)
  out = out or new_out(q, format)
  call.q, call.cache, call.format, call.selection = q, cache, format, selection
  call.listed = listed
  call.tables, call.lens, call.starts, call.tree = of.tables, of.lens, of.starts, of.tree
  call.slots, call.alibi, call.out, call.lse = slots, of.alibi, out, lse
  call.prev_out, call.prev_lse, call.causal = prev, prev_lse, is_past and 0 or 1
  call.window, call.soft_cap = of.window or 0, of.soft_cap or 0
  call.scale = of.scale or 1 / math.sqrt(q:size(-1))
  call.scores, call.hook = scores, hook and hook.code
  if hook then
    call.hook_arguments, call.hook_bytes = hook.words, hook.bytes
    call.hook_tensors, call.hook_tensors_count = hook.tensors, hook.count
    call.hook_only_keeps = hook.plan.roots[1] and 0 or 1
  end
  check(C.kvl_paged_attention(call))
  return out
end

function step.paged_attention(a)
  return step.attend(a, a.q, a.cache, a.format, a.selection, a.slots, a.out, a.lse,
    a.prev_out, a.prev_lse, a.causal == false, a.hook, a.scores, a.listed)
end

local PAGED = {
  q = needed, cache = needed, tables = needed, lens = needed, starts = a_tensor,
  selection = a_tensor, listed = a_tensor, slots = a_tensor, alibi = a_tensor,
  prev_out = a_tensor, prev_lse = a_tensor, format = FORMAT, lse = a_tensor,
  out = a_tensor, scale = options.number, causal = options.boolean,
  window = options.whole, soft_cap = options.not_negative, tree = a_tensor,
}

--- Attention over paged KV.
---@param a table  q, cache, tables, lens; starts; selection (of blocks), or listed: i32
--                 [tokens, kv_heads or 1, n], the tokens that each row of q reads, by
--                 their index in its sequence, -1: none; slots, alibi, prev_out and
--                 prev_lse, format (of cache), lse, scale (1 / sqrt(head_dim)), causal
--                 (true), window (0: none), soft_cap (0: none), tree: u64 [tokens,
--                 words], which of its sequence's newest 64 * words keys a row sees (bit
--                 i: the key at index length - 1 - i), out
---@return kvlab.Tensor out  like q unless given, and as long as a value
function M.paged_attention(a)
  return step.paged_attention(options.check("paged_attention", a, PAGED))
end

--- Merges two attentions over disjoint keys; the first is replaced by the result.
function M.merge_attention(out_a, lse_a, out_b, lse_b)
  expect_tensor("merge_attention", "out_a", out_a)
  expect_tensor("merge_attention", "lse_a", lse_a)
  expect_tensor("merge_attention", "out_b", out_b)
  expect_tensor("merge_attention", "lse_b", lse_b)
  check(C.kvl_merge_attention(out_a, lse_a, out_b, lse_b, out_a, lse_a))
  return out_a, lse_a
end

local groups = { max = tonumber(C.KVL_GROUP_MAX), mean = tonumber(C.KVL_GROUP_MEAN) }

local function group_number(name)
  return groups[name or "max"]
    or error(("group is %s, expected max or mean"):format(tostring(name)), 3)
end

--- Scores every block for a policy's ctx: f32 [seqs, kv_heads, width]. The caller owns
-- the result until the layer's attention is over. If `scores` is given, the op writes to
-- it.
---@param q kvlab.Tensor        [seqs, heads, head_dim]
---@param summary kvlab.Summary
---@param ctx kvlab.Context
---@param group? string         how the query heads of a KV head join: max, mean
---@param scores? kvlab.Tensor  f32 [seqs, kv_heads, width]
function M.score_minmax(q, summary, ctx, group, scores)
  expect_tensor("score_minmax", "q", q)
  argument("score_minmax", "summary", summary, SUMMARY)
  argument("score_minmax", "ctx", ctx, CONTEXT)
  if scores ~= nil then expect_tensor("score_minmax", "scores", scores) end
  scores = scores or ctx:new_scores()
  local entries = layer_of("score_minmax", summary, ctx)
  check(C.kvl_score_minmax(q, entries, ctx.tables, ctx.lens,
    ctx.block_size, group_number(group), scores))
  return scores
end

--- q . summary for every block, with the arguments of score_minmax.
function M.score_mean(q, summary, ctx, group, scores)
  expect_tensor("score_mean", "q", q)
  argument("score_mean", "summary", summary, SUMMARY)
  argument("score_mean", "ctx", ctx, CONTEXT)
  if scores ~= nil then expect_tensor("score_mean", "scores", scores) end
  scores = scores or ctx:new_scores()
  check(C.kvl_score_mean(q, layer_of("score_mean", summary, ctx), ctx.tables, ctx.lens,
    ctx.block_size, group_number(group), scores))
  return scores
end

--- The exact largest q . k of each block, read from the cache itself.
function M.score_max_qk(q, ctx, group, scores)
  expect_tensor("score_max_qk", "q", q)
  argument("score_max_qk", "ctx", ctx, CONTEXT)
  if scores ~= nil then expect_tensor("score_max_qk", "scores", scores) end
  scores = scores or ctx:new_scores()
  if ctx.reads then ctx.reads:keys(ctx) end
  check(C.kvl_score_max_qk(q, ctx.cache, ctx.format and ctx.format:of(ctx.layer),
    ctx.tables, ctx.lens, group_number(group), scores))
  return scores
end

--- Selects the best blocks within a budget, which includes sink and recent. They are
-- ascending.
---@param scores kvlab.Tensor     f32 [seqs, kv_heads or 1, max_blocks]
---@param lens kvlab.Tensor       i32 [seqs]
---@param block_size integer
---@param budget kvlab.Budget     kvl_budget
---@param selection kvlab.Tensor  i32 [seqs, lists, max_selected], written; lists is
--                                kv_heads or 1
---@param counts? kvlab.Tensor    i32 [seqs, lists], written
---@param limits? kvlab.Tensor    [seqs or 1, lists]: of each list, in place of the
--                                budget's ratio (f32) or blocks (i32)
function M.select(scores, lens, block_size, budget, selection, counts, limits)
  expect_tensor("select", "scores", scores)
  expect_tensor("select", "lens", lens)
  argument("select", "block_size", block_size, options.count)
  expect_tensor("select", "selection", selection)
  if counts ~= nil then expect_tensor("select", "counts", counts) end
  if limits ~= nil then expect_tensor("select", "limits", limits) end
  options.argument("select", "budget", budget, kinds.budget)
  check(C.kvl_select(scores, lens, block_size, budget, limits, selection, counts))
  return selection, counts
end

--- The number of bits in which each block's hash differs from the query hash of its KV
-- head, negated. The scores are laid out like those of score_minmax.
---@param q_hashes kvlab.Tensor  u64 [seqs, kv_heads, words]
---@param hashes kvlab.Hashes
---@param ctx kvlab.Context
---@param scores? kvlab.Tensor   written; f32 [seqs, 1, width] for the best KV head
function M.score_hamming(q_hashes, hashes, ctx, scores)
  expect_tensor("score_hamming", "q_hashes", q_hashes)
  argument("score_hamming", "hashes", hashes, SUMMARY)
  argument("score_hamming", "ctx", ctx, CONTEXT)
  if scores ~= nil then expect_tensor("score_hamming", "scores", scores) end
  scores = scores or ctx:new_scores()
  local entries = layer_of("score_hamming", hashes, ctx)
  check(C.kvl_score_hamming(q_hashes, entries, ctx.tables, ctx.lens, ctx.block_size,
    scores))
  return scores
end

local nearest_call = ffi.new "kvl_hamming"

--- Hashes the group's mean query, computes the distances and selects, in one launch.
---@param q kvlab.Tensor          [seqs, heads, head_dim]
---@param hashes kvlab.Hashes
---@param ctx kvlab.Context
---@param budget kvlab.Budget     kvl_budget
---@param selection kvlab.Tensor  i32 [seqs, kv_heads or 1, max_selected], written
---@param counts? kvlab.Tensor    i32 [seqs, kv_heads or 1], written
---@param limits? kvlab.Tensor    as for select
function M.select_hamming(q, hashes, ctx, budget, selection, counts, limits)
  expect_tensor("select_hamming", "q", q)
  argument("select_hamming", "hashes", hashes, HASHES)
  argument("select_hamming", "ctx", ctx, CONTEXT)
  expect_tensor("select_hamming", "selection", selection)
  if counts ~= nil then expect_tensor("select_hamming", "counts", counts) end
  if limits ~= nil then expect_tensor("select_hamming", "limits", limits) end
  options.argument("select_hamming", "budget", budget, kinds.budget)
  local to = nearest_call
  to.q, to.planes, to.hashes = q, hashes.planes, layer_of("select_hamming", hashes, ctx)
  to.tables, to.lens, to.block_size = ctx.tables, ctx.lens, ctx.block_size
  to.budget, to.limits, to.selection, to.counts = budget, limits, selection, counts
  check(C.kvl_select_hamming(to))
  return selection, counts
end

--- Shortens a selection in place to the fewest blocks whose weights reach `mass` of the
-- sum over all blocks.
---@param weights kvlab.Tensor  f32 [seqs, kv_heads or 1, max_blocks]
---@param mass number           0 ... 1
---@param budget kvlab.Budget   its sink and recent stay
function M.trim_selection(weights, lens, block_size, mass, budget, selection, counts)
  expect_tensor("trim_selection", "weights", weights)
  expect_tensor("trim_selection", "lens", lens)
  argument("trim_selection", "block_size", block_size, options.count)
  expect_tensor("trim_selection", "selection", selection)
  if counts ~= nil then expect_tensor("trim_selection", "counts", counts) end
  options.argument("trim_selection", "budget", budget, kinds.budget)
  options.argument("trim_selection", "mass", mass, options.number)
  check(C.kvl_trim_selection(weights, lens, block_size, mass, budget.sink, budget.recent,
    selection, counts))
  return selection, counts
end

-- ---- index-K --------------------------------------------------------------------------

M.SCALES = options.one_of("f32", "ue8m0")

--- Quantises rows to f8e4m3, each with its own scale.
---@param x kvlab.Tensor        f32 f16 bf16 [..., dim]
---@param out? kvlab.Tensor     f8e4m3 [..., dim]
---@param scales? kvlab.Tensor  f32 [...]
---@param kind? string          of scales: "f32", or "ue8m0", rounded up to 2^e ("f32")
---@return kvlab.Tensor out
---@return kvlab.Tensor scales
function M.quantise_rows(x, out, scales, kind)
  expect_tensor("quantise_rows", "x", x)
  if out ~= nil then expect_tensor("quantise_rows", "out", out) end
  if scales ~= nil then expect_tensor("quantise_rows", "scales", scales) end
  if kind ~= nil then argument("quantise_rows", "kind", kind, M.SCALES) end
  out = out or tensor.open_like(x, C.KVL_DTYPE_F8E4M3)
  if not scales then
    local dims = x:dims()
    dims[#dims] = nil
    scales = tensor.tensor(x.device, "f32", dims)
  end
  check(C.kvl_quantise_rows(x, kind == "ue8m0" and 1 or 0, out, scales))
  return out, scales
end

--- scale * H x along rows, where H is the Walsh-Hadamard matrix. scale is dim^-0.5 unless
-- it is given, which makes the op a rotation.
function M.hadamard(x, scale, out)
  expect_tensor("hadamard", "x", x)
  argument("hadamard", "scale", scale, NUMBER)
  if out ~= nil then expect_tensor("hadamard", "out", out) end
  out = out or tensor.open_like(x)
  check(C.kvl_hadamard(x, scale or x:size(-1) ^ -0.5, out))
  return out
end

--- Queries as mqa_logits takes them: rows of q in f8e4m3, and weights times `factor` (1)
-- and the row's scale.
---@param q kvlab.Tensor        f32 f16 bf16 [rows, heads, dim]
---@param weights kvlab.Tensor  f32 [rows, heads]
---@param kind? string          of scales, see quantise_rows
---@param rotates? boolean      rotates rows first, as hadamard does (false)
---@return kvlab.Tensor         # f8e4m3 [rows, heads, dim]
---@return kvlab.Tensor         # f32 [rows, heads]
function M.index_queries(q, weights, factor, kind, rotates)
  expect_tensor("index_queries", "q", q)
  expect_tensor("index_queries", "weights", weights)
  if factor ~= nil then argument("index_queries", "factor", factor, options.number) end
  if kind ~= nil then argument("index_queries", "kind", kind, M.SCALES) end
  if rotates ~= nil then
    argument("index_queries", "rotates", rotates, options.boolean)
  end
  local out, scaled = tensor.open_like(q, C.KVL_DTYPE_F8E4M3), tensor.open_like(weights)
  check(C.kvl_index_queries(q, weights, factor or 1, rotates and 1 or 0,
    kind == "ue8m0" and 1 or 0, out, scaled))
  return out, scaled
end

--- cache[place] = k [n, dim], quantised row by row. places, i64 [n], holds the place of
-- each token, or -1 to skip it. cache is u8 [blocks, block_size * (dim + 4)]. kind: of
-- the scales, see quantise_rows. rotates: see index_queries.
function M.index_append(k, places, cache, kind, rotates)
  expect_tensor("index_append", "k", k)
  expect_tensor("index_append", "places", places)
  expect_tensor("index_append", "cache", cache)
  if kind ~= nil then argument("index_append", "kind", kind, M.SCALES) end
  if rotates ~= nil then
    argument("index_append", "rotates", rotates, options.boolean)
  end
  check(C.kvl_index_append(k, places, rotates and 1 or 0, kind == "ue8m0" and 1 or 0,
    cache))
end

--- Reads the quantised keys at places into k, f8e4m3 [n, dim], and scales, f32 [n].
function M.index_gather(cache, places, k, scales)
  expect_tensor("index_gather", "cache", cache)
  expect_tensor("index_gather", "places", places)
  expect_tensor("index_gather", "k", k)
  if scales ~= nil then expect_tensor("index_gather", "scales", scales) end
  check(C.kvl_index_gather(cache, places, k, scales))
  return k, scales
end

--- The logits that an indexer gives each token, for ranges of contiguous keys.
function M.mqa_logits(q, weights, k, scales, starts, ends, logits)
  expect_tensor("mqa_logits", "q", q)
  expect_tensor("mqa_logits", "weights", weights)
  expect_tensor("mqa_logits", "k", k)
  expect_tensor("mqa_logits", "scales", scales)
  expect_tensor("mqa_logits", "starts", starts)
  expect_tensor("mqa_logits", "ends", ends)
  if logits ~= nil then expect_tensor("mqa_logits", "logits", logits) end
  check(C.kvl_mqa_logits(q, weights, k, scales, starts, ends, logits))
  return logits
end

--- The same over index-K memory, for the first lens[r] tokens of a row's sequence.
function M.mqa_logits_paged(q, weights, cache, tables, lens, logits)
  expect_tensor("mqa_logits_paged", "q", q)
  expect_tensor("mqa_logits_paged", "weights", weights)
  expect_tensor("mqa_logits_paged", "cache", cache)
  expect_tensor("mqa_logits_paged", "tables", tables)
  expect_tensor("mqa_logits_paged", "lens", lens)
  if logits ~= nil then expect_tensor("mqa_logits_paged", "logits", logits) end
  check(C.kvl_mqa_logits_paged(q, weights, cache, tables, lens, logits))
  return logits
end

-- ---- tokens by top-k ------------------------------------------------------------------

local transform = ffi.new "kvl_transform"

--- The transform of indices that a call asks for; nil if it asks for none.
local function transform_of(a)
  if not (a.tables or a.row_sequence or a.offsets) then return nil end
  transform.tables, transform.row_sequence = a.tables, a.row_sequence
  transform.offsets, transform.block_size = a.offsets, a.block_size or 0
  return transform
end

function step.topk_transform(a)
  local out = a.out or tensor.tensor(a.logits.device, "i32", { a.logits:size(0), a.k })
  check(C.kvl_topk_transform(a.logits, a.starts, a.lens, transform_of(a), out))
  return out
end

--- The options of the transform, together with other options.
local function with_transform(known)
  known.tables, known.row_sequence, known.offsets = a_tensor, a_tensor, a_tensor
  known.block_size, known.k, known.out = options.count, options.whole, a_tensor
  return known
end

--- Raises unless the call has `out`, or `k`, the entries per row of a new result.
local function check_result(what, a)
  if a.out or a.k then return end
  error(("%s: out and k are missing, expected one of them"):format(what), 3)
end

local TRANSFORM = with_transform { logits = needed, lens = needed, starts = a_tensor }

--- The tokens with the largest logits of each row: i32 [rows, k], indices in ascending
-- order, padded with -1.
---@param a table  logits f32 or bf16 [rows, n], lens i32 [rows]; out, or its k; starts
--                 i32 [rows], the column of a row's token 0. Indices become places if
--                 there are tables i32 [sequences, width], block_size and maybe
--                 row_sequence i32 [rows]; with offsets i32 [rows], index + offset
---@return kvlab.Tensor out
function M.topk_transform(a)
  options.check("topk_transform", a, TRANSFORM)
  check_result("topk_transform", a)
  return step.topk_transform(a)
end

function step.transform_indices(a)
  local out = a.out or a.indices and tensor.open_like(a.indices)
    or tensor.tensor(a.lens.device, "i32", { a.lens:size(0), a.k })
  check(C.kvl_transform_indices(a.indices, a.lens, transform_of(a), out))
  return out
end

local INDICES = with_transform { indices = a_tensor, lens = a_tensor }

--- Applies the transform alone, to indices i32 [rows, k], or to all tokens of rows with
-- these lens.
---@param a table  indices or lens (with k or out); tables, block_size, row_sequence,
--                 offsets, out as for topk_transform
---@return kvlab.Tensor out
function M.transform_indices(a)
  a = options.check("transform_indices", a, INDICES)
  if (a.indices == nil) == (a.lens == nil) then
    error("transform_indices: expected one of indices and lens", 2)
  end
  if not a.indices then check_result("transform_indices", a) end
  return step.transform_indices(a)
end

function step.topk_merge(a)
  check(C.kvl_topk_merge(a.logits, a.first, a.starts, a.lens, a.kept_values,
    a.kept_indices, a.values, a.indices))
  return a.indices, a.values
end

local MERGE = { logits = needed, first = options.required(options.whole),
                starts = a_tensor, lens = needed, kept_values = needed,
                kept_indices = needed, values = needed, indices = needed }

--- A running top-k: merges the logits of the columns from `first` on with kept_values and
-- kept_indices [rows, k], the result for the columns before, into values and
-- indices.
---@param a table  logits, first, kept_values, kept_indices, values, indices; starts
--                 and lens as for topk_transform
---@return kvlab.Tensor indices
---@return kvlab.Tensor values
function M.topk_merge(a)
  return step.topk_merge(options.check("topk_merge", a, MERGE))
end

--- For every sequence s, the places of its tokens from starts[s] on. They fill `out` up
-- to ends[s] (cumulative lengths); i32 or i64 [n].
function M.ragged_places(tables, block_size, starts, ends, out)
  expect_tensor("ragged_places", "tables", tables)
  argument("ragged_places", "block_size", block_size, options.count)
  expect_tensor("ragged_places", "starts", starts)
  expect_tensor("ragged_places", "ends", ends)
  expect_tensor("ragged_places", "out", out)
  check(C.kvl_ragged_places(tables, block_size, starts, ends, out))
  return out
end

return M
