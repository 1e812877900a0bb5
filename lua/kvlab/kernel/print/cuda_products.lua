--- Prints a score in CUDA whose sums over dim are matrix products, computed on the tensor
-- cores (kernel/expression/products.lua). What does not depend on the expression is in
-- kernels/cuda/select/expression_products.cuh.
--
-- Rows come through a ring of tiles in shared memory. A warp multiplies each tile with
-- the queries of the group, which lie in shared memory as sums of 16-bit numbers, and
-- leaves the sums in shared memory. At the end of an iteration it computes the rest of
-- the score from these sums: with one lane for each block or, where each token has a sum,
-- with a team of lanes for each block.
local expression = require "kvlab.kernel.expression.expression"
local shared = require "kvlab.kernel.print.c_text"
local printer = require "kvlab.kernel.print.cuda_printer"
local products = require "kvlab.kernel.expression.products"

local bytes_of, indented, TYPES = shared.bytes_of, shared.indented, shared.TYPES
local M = {}

local WARP, KIB = 32, 1024
-- ORDER kvl_dtype
local QUERY_DTYPES = { f32 = 0, f16 = 1, bf16 = 2 }

-- ---- whether a score can be printed in this way ---------------------------------------

--- KiB of shared memory that a thread block may have, and a multiprocessor has.
local SHARED = { [80] = { 163, 164 }, [86] = { 99, 100 }, [87] = { 163, 164 },
                 [89] = { 99, 100 }, [120] = { 99, 100 }, [121] = { 99, 100 } }
local SHARED_OTHERS = { 227, 228 }

--- The architecture of a target, "sm_90a" or "compute_80"; 90 if the target is no GPU.
local function number_of(target)
  return tonumber(target:match "^sm_(%d+)" or target:match "^compute_(%d+)") or 90
end

--- The same for a target.
local function limits_of(target) return SHARED[number_of(target)] or SHARED_OTHERS end

--- The ring of each warp: score_ring of score_mma.cuh.
local function ring_of(size, dim, rows)
  local tile = 16 * rows * dim * size
  local is_deep = size < 4 or tile > 16 * KIB
  local ring = is_deep and tile <= 16 * KIB and 48 * KIB or 96 * KIB
  local tiles, ahead = math.floor(ring / tile), is_deep and 3 or 2
  local warps = tiles >= 4 * ahead and 4 or math.floor(tiles / ahead)
  local stages = math.min(8, math.floor(tiles / math.max(warps, 1)))
  return { warps = warps, blocks = 192 * KIB / ring, bytes = warps * stages * tile }
end

--- How many 16-bit numbers stand for a factor: score_terms of score_mma.cuh.
local function terms_of(sum, row_dtype, q_dtype)
  if not sum.is_exact then q_dtype = "f32" end
  if row_dtype == "f16" or row_dtype == "f8e4m3" then
    return q_dtype == "f32" and 2 or 1
  end
  return q_dtype == "bf16" and 1 or q_dtype == "f16" and 2 or 3
end

--- Bytes of shared memory with queries of a dtype.
local function bytes_with(self, q_dtype)
  local found, bytes = self.found, self.bytes_fixed
  for _, sum in ipairs(found.sums) do
    bytes = bytes + terms_of(sum, found.dtype, q_dtype) * #sum.factors * self.padded
      * self.row_dim * 2
  end
  return bytes
end

--- The parts of such a kernel for a plan; nil: the score has to be printed in another
-- way.
---@param plan kvlab.Plan
---@param target string  "sm_90a", or what is no GPU
---@return table|nil
function M.find(plan, target)
  local sm = number_of(target)
  if plan.place ~= "score" or sm < 80 then return nil end
  local dim, group = plan.sizes.dim, plan.sizes.head
  if dim % 8 ~= 0 or dim > 256 then return nil end
  local found = products.find(plan)
  if not found or dim * bytes_of(found.dtype) % 16 ~= 0 then return nil end
  local self = printer.new(plan)
  self.found, self.padded = found, math.ceil(group / 8) * 8
  self.row_dim = dim <= 64 and 64 or dim <= 128 and 128 or 256
  local ring = ring_of(bytes_of(found.dtype), self.row_dim, #found.rows)
  if ring.warps < 1 then return nil end
  self.ring, self.lanes, self.team = ring, found.of_tokens and "token", 1
  local tokens = found.of_tokens and plan.sizes.token or 1
  while self.team < math.min(tokens, WARP) do self.team = self.team * 2 end
  self.each, self.partial = math.ceil(tokens / self.team), false
  self.slots = self.team * self.each
  self.stride = math.max(self.slots, WARP) + 4 -- lanes that store are in different banks
  self.products_bytes = #found.sums * group * self.stride * 4
  self.bytes_fixed = ring.bytes + 128
    + math.ceil(ring.warps * self.products_bytes / 16) * 16
    + #found.sums * self.padded * 4
  local limits = limits_of(target)
  if bytes_with(self, "f32") > limits[1] * KIB then return nil end
  self.limits = limits
  return self
end

-- ---- factors, and sums term by term ---------------------------------------------------

--- The text of a leaf at one head and number d of its row; nil for other nodes.
local function leaf_text(self, x, rows)
  if x.op == "number" then return shared.literal(nil, x.value, x.type) end
  if x.op == "param" then return ("(float)a->param_%s"):format(x.name) end
  if x.op == "const" then
    local text = "0"
    for _, dim in ipairs(x.stored) do
      text = ("(%s * %d + %s)"):format(text, self.plan.sizes[dim],
        dim == "dim" and "d" or dim)
    end
    return printer.load_one("a->const_" .. x.name, text, x.dtype, x.type)
  end
  local row = rows and (x.op == "leaf" or x.op == "field") and rows[x.op .. x.name]
  return row or #x.args == 0 and x.name or nil
end

--- The text of a value at one head and number d of its row, after lines for nodes that it
-- uses several times. rows: the text of each row.
local function value_text(self, x, rows, lines)
  local text_of, named = {}, expression.named { x }
  expression.each(x, function(one)
    local text = leaf_text(self, one, rows)
    if not text then
      local texts = {}
      for i, arg in ipairs(one.args) do texts[i] = text_of[arg] end
      text = one.op == "unit" and texts[1]
        or "(" .. shared.operation(one, texts, false, true) .. ")"
    end
    if named[one] and one ~= x then
      local name = "t" .. #lines + 1
      lines[#lines + 1] = ("const %s %s = %s;"):format(TYPES[one.type], name, text)
      text = name
    end
    text_of[one] = text
  end)
  return text_of[x]
end

local EXACT = [[
DEVICE_APART float exact_%d(const arguments *a, const uint4 *tile, int item,
                            int64_t q_row, int head, int kv_head) {
  [[maybe_unused]%s const int layer = (int)a->layer;
  float sum = 0;
#pragma unroll 1
  for (int d = 0; d < DIM; d++) {
    const float q = q_at(a, q_row + head * DIM + d);
%s    sum += %s;
  }
  return sum;
}
]]

--- A sum term by term, for an item of a tile.
local function exact_text(self, at, sum)
  local lines, names = {}, {}
  for _, factor in ipairs(sum.factors) do
    local leaf = self.found.rows[factor.row]
    local name = "r" .. factor.row
    names[leaf.op .. leaf.name] = name
    lines[#lines + 1] = ("const float %s = tile_number<T, D>(tile, %d, item, d);")
      :format(name, factor.row - 1)
  end
  local text = value_text(self, sum.body, names, lines)
  return EXACT:format(at, "]", indented(lines, "    "), text)
end

local FACTORS = [[
    {
      float x[%d][8];
#pragma unroll
      for (int e = 0; e < 8; e++) {
        [[maybe_unused]%s const int d = piece * 8 + e;
        const float q = queries[e];
%s      }
      kvl::score_store_terms<T, D>(x, head, piece, PADDED, terms_%d, q_%d,
                                   unscale_%d + head);
    }
]]

--- Lines that bring the factors of a sum into shared memory, in a loop over heads and
-- groups of 8 dims.
local function factors_text(self, at, sum)
  local lines = {}
  for i, factor in ipairs(sum.factors) do
    local text = value_text(self, factor.x, nil, lines)
    lines[#lines + 1] = ("x[%d][e] = inside ? %s : 0.0f;"):format(i - 1, text)
  end
  return FACTORS:format(#sum.factors, "]", indented(lines, "        "), at, at, at)
end

-- ---- the kernel -----------------------------------------------------------------------

local HEAD = [[
enum { GROUP = %d, PADDED = %d, D = %d, ROWS = %d, SLOTS = %d, STRIDE = %d };
using T = %s;
using turns_type = product_turns<T, D, ROWS, DIM, %s, SLOTS>;
using ring = turns_type::ring;
static_assert(ring::WARPS * 32 == THREADS && ring::RING_BYTES == %d, "as it is launched");
]]

local SCORE = [[
extern "C" __global__ void __launch_bounds__(THREADS, ring::BLOCKS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  DYNAMIC_SHARED(memory);
  const int kv_heads = (int)a->kv_heads, kv_head = blockIdx.x %% kv_heads;
  const int64_t seq = blockIdx.y, width = a->width;
  /* the compiler sees that all lanes have the same */
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  [[maybe_unused]%s const int lane = threadIdx.x %% TEAM;
  const int team = threadIdx.x %% 32 / TEAM;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS;
  const int first = (int)(blockIdx.x / kv_heads * a->each);
  const int stop = (int)(first + a->each < width ? first + a->each : width);
  const int end = min_i32(stop, blocks);
  const int32_t *table = (const int32_t *)a->tables + seq * width;
  const int32_t *last = (const int32_t *)a->last;
  float *scores = (float *)a->scores + (seq * kv_heads + kv_head) * width;
  const int64_t q_row = ((last ? last[seq] : seq) * kv_heads + kv_head) * %d;
  for (int b = max_i32(first, end) + threadIdx.x; b < stop; b += THREADS)
    scores[b] = -INFINITY;
  if (first >= end) return;
  uint32_t *known = (uint32_t *)(memory + ring::RING_BYTES);
  turns_type turns = {
      {%s},
      (uint32_t)(%s), table, first, end, length, (int)a->rows,
      memory + warp * ring::STAGES * ring::TILE_BYTES,
      known + warp * ring::STAGES, warp, 0, 0};
  turns.begin();

  float *products = (float *)(memory + ring::RING_BYTES + 128) + warp * %d;
%s  for (int i = threadIdx.x; i < PADDED * (D / 8); i += THREADS) {
    const int head = i / (D / 8), piece = i %% (D / 8);
    const bool inside = head < GROUP && piece * 8 < DIM;
    float queries[8];
    q_load<8>(a, q_row + head * DIM + piece * 8, inside, queries);
%s  }
%s  __syncthreads();

  using all = turns_type;
  const int place = team * (SLOTS < 32 ? SLOTS : 0); /* first slot of the lane's block */
  int tile = 0;
  for (int base = first + warp * all::BLOCKS; base < end; base += all::STEP) {
    bool known = false;
    for (int part = 0; part < all::TILES; part++, tile++) {
      uint32_t items;
      const uint4 *rows = turns.take(tile, &items);
      if (part == place / 16) known = items >> place %% 16 & 1;
%s    }
    __syncwarp();
    const int block = base + team;
    [[maybe_unused]%s const int tokens = min_i32(TOKENS, length - block * TOKENS);
%s    __syncwarp(); /* the products were read */
  }
  kvl::copy_wait<0>();
}
]]

--- Where the first item of each row starts.
local function row_places(self)
  local places = {}
  for i, leaf in ipairs(self.found.rows) do
    if leaf.op == "field" then
      places[i] = ("(const T *)a->field_%s + kv_head * DIM"):format(leaf.name)
    else
      places[i] = ("(const T *)kvl__%s_of(&a->cache, 0, kv_head)"):format(
        leaf.name == "v" and "values" or "keys")
    end
  end
  return table.concat(places, ",\n       ")
end

--- Lines for the queries of each sum: how many terms, and where they lie.
local function query_lines(self)
  local lines, found = {}, self.found
  local is_half = found.dtype == "f16" or found.dtype == "f8e4m3"
  lines[1] = ("float *unscale_1 = (float *)(memory + %d);"):format(
    self.bytes_fixed - #found.sums * self.padded * 4)
  lines[2] = ("uint4 *q_1 = (uint4 *)(memory + %d);"):format(self.bytes_fixed)
  for i, sum in ipairs(found.sums) do
    local terms = is_half and "2" or "3"
    if sum.is_exact then
      terms = ("kvl::score_terms<%s>((int)a->q_dtype)"):format(
        "typename kvl::score_type<T>::type")
    end
    lines[#lines + 1] = ("const int terms_%d = %s;"):format(i, terms)
    if i < #found.sums then
      lines[#lines + 1] = ("float *unscale_%d = unscale_%d + PADDED;"):format(i + 1, i)
      lines[#lines + 1] = ("uint4 *q_%d = q_%d + terms_%d * %d;"):format(i + 1, i, i,
        #sum.factors * self.padded * self.row_dim / 8)
    end
  end
  return lines
end

--- Lines that multiply a tile with the queries.
local function sum_lines(self)
  local lines = {}
  for i, sum in ipairs(self.found.sums) do
    local used = 0
    for _, factor in ipairs(sum.factors) do used = used + 2 ^ (factor.row - 1) end
    local into = (i - 1) * self.plan.sizes.head * self.stride
    lines[#lines + 1] = ("tile_sums<T, D, ROWS, %d, DIM, GROUP, STRIDE>(rows, q_%d, "
      .. "unscale_%d, terms_%d, products + %d + part * 16,"):format(used, i, i, i, into)
    lines[#lines + 1] = ("    [=](int head, int item) { return exact_%d(a, rows, item, "
      .. "q_row, head, kv_head); });"):format(i)
  end
  return lines
end

--- The plan of what is computed from the products.
local function plan_of_rest(self)
  local plan, rest = self.plan, self.found.rest
  local used, fields = {}, {}
  expression.each(rest, function(x)
    if x.op == "field" then used[x.name] = true end
  end)
  for _, field in ipairs(plan.fields) do
    if used[field.name] then fields[#fields + 1] = field end
  end
  return setmetatable({ roots = { { name = "scores", node = rest } }, uses = {},
                        fields = fields }, { __index = plan })
end

--- Lines that compute the rest of the score, and the lines among them that are fixed for
-- the kernel.
local function rest_lines(self)
  local whole, group = self.plan, self.plan.sizes.head
  self.plan = plan_of_rest(self)
  function self.product(x, bind)
    local slot = bind.token and ("team * SLOTS + %s"):format(bind.token.text) or "team"
    return ("products[(%d + %s) * STRIDE + %s]"):format((x.at - 1) * group,
      bind.head.text, slot)
  end
  local fixed, lines = shared.body(self, function(s)
    local text = s:value(self.plan.roots[1].node, {})
    s:line(("if (%sblock < end) scores[block] = known ? (float)(%s) : -INFINITY;")
      :format(self.team > 1 and "lane == 0 && " or "", text))
  end)
  local before = {}
  if #self.plan.fields > 0 then
    before[1] = "const int64_t physical = known ? table[block] : 0;"
    printer.row_lines(self.plan, before, "physical", "")
  end
  self.plan = whole
  return fixed, indented(before, "    ") .. indented(lines, "    ")
end

--- The source of a kernel without its title, and how it is launched.
---@param self table  as M.find gives it
---@return string source
---@return table launch
function M.print(self)
  local plan, found, ring = self.plan, self.found, self.ring
  local group, dim = plan.sizes.head, plan.sizes.dim
  local exact, factors = {}, {}
  for i, sum in ipairs(found.sums) do
    exact[i], factors[i] = exact_text(self, i, sum), factors_text(self, i, sum)
  end
  local fixed, rest = rest_lines(self)
  local starts = printer.fixed_lines(plan)
  local text = '#include "cuda/select/expression_products.cuh"\n\n'
    .. ("enum { TOKENS = %d, DIM = %d, THREADS = %d, TEAM = %d, TEAMS = %d };\n"):format(
      plan.sizes.token, dim, ring.warps * WARP, self.team, WARP / self.team)
    .. shared.struct(plan) .. "\n"
    .. HEAD:format(group, self.padded, self.row_dim, #found.rows, self.slots, self.stride,
      printer.CPP[found.dtype], found.of_tokens and "TOKENS" or "1", ring.bytes)
    .. printer.Q_AT .. table.concat(exact)
    .. SCORE:format("]", group * dim, row_places(self),
      found.of_tokens and "a->cache.bytes_page / sizeof(T)" or "kv_heads * DIM",
      self.products_bytes / 4,
      indented(starts, "  ") .. indented(query_lines(self), "  "), table.concat(factors),
      indented(fixed, "  "), indented(sum_lines(self), "      "),
      "]", rest)
  local bytes, at_once = {}, {}
  for name, dtype in pairs(QUERY_DTYPES) do
    bytes[dtype] = bytes_with(self, name)
    at_once[dtype] = math.max(1, math.min(ring.blocks,
      math.floor(self.limits[2] * KIB / (bytes[dtype] + KIB))))
  end
  return text, { threads = ring.warps * WARP, bytes_shared = bytes, at_once = at_once,
    turn = ring.warps * math.max(1, WARP / self.slots),
    most = found.of_tokens and 1024 / plan.sizes.token or math.huge }
end

M.QUERY_DTYPES, M.limits_of, M.terms_of = QUERY_DTYPES, limits_of, terms_of

return M
