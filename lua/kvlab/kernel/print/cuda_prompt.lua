--- Prints CUDA code for what a prefill emits. A thread block takes a few blocks of a
-- KV head, whose keys stay in shared memory, and all queries that see them, a tile at a
-- time. The warps multiply the tile with the keys on the tensor cores and leave the
-- scores in shared memory. Then teams of lanes compute the expressions from the scores;
-- each team takes one query and one block at a time. A block's sum always has the same
-- order. kernels/cuda/attention/emission.cuh has the code that does not depend on the
-- expressions.
local expression = require "kvlab.kernel.expression.expression"
local pages = require "kvlab.tensor.pages"
local products = require "kvlab.kernel.print.cuda_products"
local schedule = require "kvlab.kernel.print.schedule"
local shared = require "kvlab.kernel.print.c_text"
local printer = require "kvlab.kernel.print.cuda_printer"

local bytes_of, indented = shared.bytes_of, shared.indented
local M = {}

local KIB, DIM_MOST = 1024, 576

-- ---- its shape ------------------------------------------------------------------------

local function round_up(n, to) return math.ceil(n / to) * to end

--- The dtype of keys in shared memory: packed keys become f32, and so do long ones in
-- f16, because what scales a query for f16 takes at most 256 numbers.
local function tile_dtype(plan)
  local is_long = plan.codec == "f16" and plan.sizes.dim > 256
  return (is_long or pages.CODECS[plan.codec].packs) and "f32" or plan.codec
end

--- What a thread block of `threads` threads works on, with `rows` query rows at once.
local function shape_of(plan, threads, rows)
  local sizes, s = plan.sizes, { threads = threads, rows = rows }
  s.slice = threads / 2 -- 16 keys for each warp
  s.blocks = math.max(1, math.floor(s.slice / sizes.token))
  s.keys = math.max(s.slice, round_up(sizes.token, s.slice))
  s.queries = math.floor(rows / sizes.head)
  s.team = 1
  while s.team < math.min(sizes.token, 32) do s.team = s.team * 2 end
  s.stride = s.keys + 4
  s.dim = sizes.dim <= 64 and 64 or sizes.dim <= 128 and 128
    or math.max(256, round_up(sizes.dim, 64))
  s.keys_bytes = s.slice * s.dim * bytes_of(tile_dtype(plan))
  s.logits_bytes = (rows * s.stride + 32) * 4
  -- shared memory that is not dynamic: of, counts, start, at, lse
  s.static = s.blocks * 16 + s.queries * 8 + rows * 8 + KIB
  function s.bytes(q_dtype)
    local terms = products.terms_of({ is_exact = true }, tile_dtype(plan), q_dtype)
    local bytes = s.keys_bytes + s.logits_bytes + rows * 4 + terms * rows * s.dim * 2
    -- above 48 KiB in all, the launch has to ask for them, which it does by this number
    return bytes + s.static > 48 * KIB and math.max(bytes, 48 * KIB + 16) or bytes
  end
  --- Do queries of a dtype fit in so many KiB?
  function s.fits(q_dtype, room) return s.bytes(q_dtype) + s.static <= room * KIB end
  return s
end

-- Threads and query rows, the best first.
local SHAPES = { { 256, 64 }, { 256, 32 }, { 128, 64 }, { 128, 32 }, { 128, 16 },
                 { 64, 32 }, { 64, 16 }, { 64, 8 }, { 32, 8 } }

--- The largest shape of which two thread blocks fit a multiprocessor, else one; where
-- long queries of f32 do not fit at all, one for those of bf16.
local function choose(plan, target)
  if plan.sizes.dim > DIM_MOST then
    error(("%s: keys of %d numbers, expected at most %d where a prefill emits on a GPU")
      :format(plan.what, plan.sizes.dim, DIM_MOST), 0)
  end
  local limits = products.limits_of(target)
  local least = round_up(plan.sizes.head, 8)
  for _, widest in ipairs { "f32", "bf16" } do
    for _, room in ipairs { math.floor(limits[2] / 2), limits[1] } do
      for _, one in ipairs(SHAPES) do
        local s = shape_of(plan, one[1], math.max(one[2], least))
        if s.fits("bf16", room) and s.fits(widest, limits[1]) then return s end
      end
    end
  end
  error(("%s: blocks of %d tokens under groups of %d heads do not fit in shared memory")
    :format(plan.what, plan.sizes.token, plan.sizes.head), 0)
end

-- ---- the kernel -----------------------------------------------------------------------

local HEAD = [[
enum {
  TOKENS = %d, DIM = %d, GROUP = %d, SUMS = %d, THREADS = %d, TEAM = %d,
  TEAMS = THREADS / TEAM,
  BLOCKS = %d, KEYS = %d, SLICE = %d, STRIDE = %d, /* keys of the blocks, and at once */
  QUERIES = %d, ROWS = %d, D = %d,
  PER_BLOCK = TEAMS / BLOCKS, /* teams of a block */
};
using C = %s; /* of an element of the cache, */
using T = %s; /* and of the tiles */
]]

local QUERY_VALUE = [[
DEVICE %s compute_%s(const arguments *a, int kv_head, int length, int blocks,
                     int query_index) {
%s}

]]

-- Where not all queries are needed.
local NEEDED = [[
/* Finds the next queries that are needed, QUERIES of them at most, from *next on; every
 * warp does the same. */
DEVICE int next_queries(const arguments *a, int kv_head, int length, int blocks,
                        int index0, int rows, int *next, int *at) {
  const int lane = threadIdx.x % 32;
  int n = 0;
  while (n < QUERIES && *next < rows) {
    const int query = *next + lane, left = QUERIES - n;
    const bool is = query < rows &&
                    compute_needed(a, kv_head, length, blocks, index0 + query);
    const uint32_t found = __ballot_sync(0xFFFFFFFFu, is);
    const int place = __popc(found & ((1u << lane) - 1));
    if (is && place < left && threadIdx.x < 32) at[n + place] = query;
    const uint32_t rest = __ballot_sync(0xFFFFFFFFu, is && place == left);
    *next += rest ? __popc(rest - 1) : 32;
    n += rest ? left : __popc(found);
  }
  return n;
}

]]

local ALL_NEEDED = [[
DEVICE int next_queries(const arguments *, int, int, int, int, int rows, int *next,
                        int *at) {
  const int n = min_i32(QUERIES, rows - *next);
  for (int i = threadIdx.x; i < n; i += THREADS) at[i] = *next + i;
  *next += n;
  return n;
}

]]

local PROMPT = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  DYNAMIC_SHARED(memory);
  __shared__ int of[BLOCKS], counts[BLOCKS], at[2][QUERIES];
  __shared__ int64_t start[BLOCKS];
  __shared__ float row_lse_of[2][ROWS];
  const int kv_heads = (int)a->kv_heads;
  const int64_t row = blockIdx.x, seq = row / kv_heads, width = a->width;
  const int kv_head = (int)(row %% kv_heads);
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS;
  const int64_t first = ((const int32_t *)a->starts)[seq];
  const int rows = (int)(((const int32_t *)a->starts)[seq + 1] - first);
  const int index0 = length - rows;
  if (rows <= 0) return;
  for (int b = threadIdx.x; b < BLOCKS; b += THREADS) {
    const int64_t entry = (int64_t)blockIdx.y * BLOCKS + b;
    const int32_t *selection = (const int32_t *)a->selection;
    const int32_t *slots = (const int32_t *)a->slots;
    int found = -1;
    if (entry < a->entries)
      found = selection ? selection[(seq * a->selection_heads +
                                     kv_head %% a->selection_heads) * a->entries + entry]
                        : (int)entry;
    if (found >= blocks || found >= width) found = -1;
    int64_t physical = -1;
    if (found >= 0)
      physical = slots ? slots[(seq * a->slot_heads + kv_head %% a->slot_heads) *
                                   a->entries + entry]
                       : ((const int32_t *)a->tables)[seq * width + found];
    if (physical < 0 || physical >= a->rows) found = -1;
    of[b] = found;
    counts[b] = found >= 0 ? min_i32(TOKENS, length - found * TOKENS) : 0;
    start[b] = found >= 0
                   ? kvl__strip_at(&a->cache, &a->cache.key, physical, kv_head) : 0;
  }
  __syncthreads();
  int lowest = 0x7FFFFFFF;
  for (int b = 0; b < BLOCKS; b++)
    if (of[b] >= 0) lowest = min_i32(lowest, of[b]);
  if (lowest == 0x7FFFFFFF) return;

  const int terms = kvl::score_terms<typename kvl::score_type<T>::type>((int)a->q_dtype);
  char *tiles = memory;
  float *all_logits = (float *)(memory + %d);
  float *unscale = (float *)(memory + %d);
  uint4 *q = (uint4 *)(memory + %d);
  if (KEYS == SLICE)
    emission_keys<C, T, D, DIM, TOKENS, BLOCKS, SLICE, THREADS>(
        tiles, &a->cache, start, counts, 0);
  const float *alibi = (const float *)a->alibi, *unit = a->cache.k_scale;
  const float soft_cap = (float)a->soft_cap;
  const float factor = (float)a->scale * (unit ? unit[kv_head] : 1.0f);
%s
%s  int turn = 0;
  for (int next = max_i32(0, lowest * TOKENS - index0); next < rows; turn ^= 1) {
    const int n =
        next_queries(a, kv_head, length, blocks, index0, rows, &next, at[turn]);
    if (n == 0) break;
    __syncthreads(); /* `at` is there, and the products of the tile before are, too */
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
      const int64_t query = first + (i < n * GROUP ? at[turn][i / GROUP] : 0);
      row_lse_of[turn][i] =
          ((const float *)a->lse)[(query * kv_heads + kv_head) * GROUP + i %% GROUP];
    }
    for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
      const int r = i / (D / 8), part = i %% (D / 8);
      const bool inside = r < n * GROUP && part * 8 < DIM;
      const int64_t query = first + (inside ? at[turn][r / GROUP] : 0);
      float x[1][8];
      q_load<8>(a, ((query * kv_heads + kv_head) * GROUP + r %% GROUP) * DIM + part * 8,
                inside, x[0]);
      kvl::score_store_terms<T, D, 1>(x, r, part, ROWS, terms, q, unscale + r);
    }
    for (int from = 0; from < KEYS; from += SLICE) {
      if (KEYS > SLICE) {
        __syncthreads();
        emission_keys<C, T, D, DIM, TOKENS, BLOCKS, SLICE, THREADS>(
            tiles, &a->cache, start, counts, from);
      }
      __syncthreads(); /* queries and keys are there, and the scores before were read */
      const int tile = threadIdx.x / 32 * 16;
      emission_products<T, D, DIM, ROWS>(
          tiles + tile * D * (int)sizeof(T), q, terms, [&](int r, int key, float x) {
            key += from + tile;
            x *= unscale[r] * factor;
            if (soft_cap > 0) x = soft_cap * tanh_f32(x / soft_cap);
            if (alibi && r < n * GROUP && key < BLOCKS * TOKENS) {
              const int index = of[key / TOKENS] * TOKENS + key %% TOKENS;
              x += alibi[kv_head * GROUP + r %% GROUP] *
                   (float)kvl__apart(index, index0 + at[turn][r / GROUP]);
            }
            all_logits[r * STRIDE + key] = x;
          });
    }
    __syncthreads();
    for (int base = 0; base < n; base += PER_BLOCK) { /* lanes of a warp must not part */
      const int b = team %% BLOCKS, i = base + team / BLOCKS;
      const int block = of[b], own = i < n ? i : 0;
      const int query_index = index0 + at[turn][own];
      const int seen = min_i32(TOKENS, query_index + 1 - block * TOKENS);
      const bool known = team < PER_BLOCK * BLOCKS && i < n && block >= 0 && seen > 0;
      const int tokens = known ? seen : 0;
      [[maybe_unused]%s const int seen_from =
          kvl__window_begin((int)a->window, query_index);
%s      [[maybe_unused]%s const float *row_lse = row_lse_of[turn] + own * GROUP;
      [[maybe_unused]%s const float *logits =
          all_logits + own * GROUP * STRIDE + b * TOKENS;
%s    }
  }
  const bool stores = team < BLOCKS && of[team %% BLOCKS] >= 0;
  const int64_t to = row * width + of[team %% BLOCKS];
%s}
]]

--- The functions that compute values which depend only on a query, and the function that
-- finds the queries that are needed.
local function query_functions(self)
  local plan, texts = self.plan, {}
  for i, value in ipairs(plan.query_values) do
    local s = schedule.new(self, plan.sizes)
    s:take({ value.node }, expression.each)
    s.block_level = schedule.FIXED
    local text, lines = s:value(value.node, {}), printer.fixed_lines(plan)
    for _, line in ipairs(s.scopes[schedule.FIXED].lines) do lines[#lines + 1] = line end
    lines[#lines + 1] = ("return %s;"):format(text)
    texts[i] = QUERY_VALUE:format(shared.TYPES[value.node.type], value.name,
      indented(lines, "  "))
  end
  return table.concat(texts) .. (plan.needed and NEEDED or ALL_NEEDED)
end

--- How many sums each lane holds for a root, that is for one emitted expression.
local function cells_of(root, each) return root.by_token and each or 1 end

--- The source of a kernel without its title, and how it is launched.
---@param plan kvlab.Plan
---@param target string  "sm_90a"
---@return string source
---@return table launch
function M.print(plan, target)
  local self, s, sizes = printer.new(plan), choose(plan, target), plan.sizes
  self.lanes, self.team, self.partial = "token", s.team, false
  self.each = math.ceil(sizes.token / s.team)
  local sum_of, sums = {}, 0 -- the first of a root's sums that a thread has
  for _, root in ipairs(plan.roots) do
    sum_of[root], sums = sums, sums + cells_of(root, self.each)
  end
  local fixed, block = shared.body(self, function(one)
    for _, root in ipairs(plan.roots) do
      local sum = sum_of[root]
      local function add(text, condition)
        one:line((root.join == "max" and "if (%s) sums[%d] = max_f32(sums[%d], %s);"
          or "if (%s) emission_add(sums[%d], lost[%d], %s);"):format(condition, sum, sum,
          text))
        sum = sum + 1
      end
      if root.by_token then
        one:over({ "token" }, function(bind)
          add(one:value(root.node, bind), bind.token.text .. " < tokens")
        end)
      else
        add(one:value(root.node, {}), "known")
      end
    end
  end)
  local before, starts, ends = printer.fixed_lines(plan), {}, {}
  for _, text in ipairs(shared.input_lines(plan, "seq", "row")) do
    before[#before + 1] = text
  end
  for _, root in ipairs(plan.roots) do
    for k = 0, cells_of(root, self.each) - 1 do
      local sum, at = sum_of[root] + k, ("lane + %d"):format(k * s.team)
      starts[sum + 1] = ("sums[%d] = %s;"):format(sum, shared.nothing(root))
      ends[#ends + 1] = ("total = emission_total<PER_BLOCK, BLOCKS * TEAM, %s>(all_logits"
        .. ", sums[%d]);"):format(root.join == "max" and "true" or "false", sum)
      ends[#ends + 1] = ("if (stores && %s) ((float *)a->emit_%s)[%s] = total;"):format(
        root.by_token and at .. " < TOKENS" or "lane == 0", root.name,
        root.by_token and "to * TOKENS + " .. at or "to")
    end
  end
  local text = '#include "cuda/attention/emission.cuh"\n\n'
    .. HEAD:format(sizes.token, sizes.dim, sizes.head, sums, s.threads, s.team,
      s.blocks, s.keys, s.slice, s.stride, s.queries, s.rows, s.dim,
      printer.CPP[plan.codec], printer.CPP[tile_dtype(plan)])
    .. shared.struct(plan) .. "\n" .. printer.Q_AT .. query_functions(self)
    .. PROMPT:format(s.keys_bytes, s.keys_bytes + s.logits_bytes,
      s.keys_bytes + s.logits_bytes + s.rows * 4,
      indented(before, "  ") .. indented(fixed, "  "),
      "  [[maybe_unused]] float sums[SUMS], lost[SUMS] = {}, total;\n"
        .. indented(starts, "  "), "]",
      indented(shared.query_value_lines(plan), "      "), "]", "]",
      indented(block, "      "), indented(ends, "  "))
  local bytes, most = {}, products.limits_of(target)[1]
  for name, dtype in pairs(products.QUERY_DTYPES) do
    bytes[dtype] = s.fits(name, most) and s.bytes(name) or nil
  end
  return text, { threads = s.threads, items = s.blocks, bytes_shared = bytes }
end

return M
