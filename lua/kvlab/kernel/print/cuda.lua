--- Prints a kernel in CUDA, from its plan. What it calls is in
-- kernels/cuda/expression.cuh; kernel/print/cuda_*.lua print its parts.
local attention = require "kvlab.kernel.print.cuda_attention"
local expression = require "kvlab.kernel.expression.expression"
local shared = require "kvlab.kernel.print.c_text"
local printer = require "kvlab.kernel.print.cuda_printer"
local products = require "kvlab.kernel.print.cuda_products"
local prompt = require "kvlab.kernel.print.cuda_prompt"
local score = require "kvlab.kernel.print.cuda_score"

local bytes_of, indented, TYPES = shared.bytes_of, shared.indented, shared.TYPES
local ELEMENTS, fixed_lines = printer.ELEMENTS, printer.fixed_lines
local M = {}

local THREADS, WARP = 256, 32
-- How many floats of queries each lane holds in registers; larger queries lie in shared
-- memory.
local QUERY_FLOATS = 64

local SUMMARY = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int kv_heads = (int)a->kv_heads;
  const int64_t item = (int64_t)blockIdx.x * TEAMS + team;
  const int64_t entry = item < a->n * kv_heads ? item / kv_heads : 0;
  const int kv_head = (int)(item %% kv_heads);
  const int64_t found = ((const int32_t *)a->k_blocks)[entry];
  const int64_t row = ((const int32_t *)a->blocks)[entry];
  const bool known = item < a->n * kv_heads && found >= 0 && found < a->cache.blocks &&
                     row >= 0 && row < a->rows;
  const int64_t physical = known ? found : 0;
  const int tokens = min_i32(((const int32_t *)a->counts)[entry], TOKENS);
%s}
]]

local MAP = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int64_t item = blockIdx.x, seq = item / a->heads;
  const int kv_head = (int)(item %% a->heads);
  const int block = (int)(blockIdx.y * THREADS + threadIdx.x);
  if (block >= a->width) return;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (int)(((int64_t)length + a->block_size - 1) / a->block_size);
  float *out = (float *)a->out + item * a->width;
%s}
]]

local function store(self, s, root, dims, bind, text, pending)
  local p = ("(char *)a->field_%s + (row * kv_heads + kv_head) * %d"):format(root.name,
    root.count * bytes_of(root.dtype))
  local kind = ELEMENTS[root.dtype] or root.dtype
  local to = bind.dim
  if not to then
    s:line(("if (known && lane == 0) store_%s(%s, %s, %s);"):format(kind, p,
      s:index(dims, bind), text))
    return
  end
  local list = pending[root] or {}
  pending[root] = list
  list[#list + 1] = text
  if #list < self.vec then return end
  pending[root] = nil
  local first = {}
  for dim, one in pairs(bind) do first[dim] = one end
  first.dim = self:element("dim", to.chunk * self.vec)
  local values = s:name "v"
  s:line(("const %s %s[%d] = {%s};"):format(TYPES[root.node.type], values, self.vec,
    table.concat(list, ", ")))
  s:line(("if (known && lane + %d < %d) store_chunk_%s<%d>(%s, %s, %s);"):format(
    to.chunk * self.team, self.chunks, kind, self.vec, p, s:index(dims, first), values))
end

local function print_summary(self)
  local plan = self.plan
  local fixed, block = shared.body(self, function(s)
    local pending = {}
    for _, root in ipairs(plan.roots) do
      local dims = root.node.dims
      s:over(dims, function(bind)
        store(self, s, root, dims, bind, s:value(root.node, bind), pending)
      end)
    end
  end)
  local lines = fixed_lines(plan)
  printer.row_lines(plan, lines, "physical", "")
  return SUMMARY:format(indented(lines, "  ") .. indented(fixed, "  ")
    .. indented(block, "  "))
end

local function print_map(self)
  local plan = self.plan
  local fixed, block = shared.body(self, function(s)
    s:line(("out[block] = (float)(%s);"):format(s:value(plan.roots[1].node, {})))
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(shared.input_lines(plan, "seq", "item")) do
    lines[#lines + 1] = text
  end
  return MAP:format(indented(lines, "  ") .. indented(fixed, "  ")
    .. indented(block, "  "))
end

local PRINTS = { score = score.print, summary = print_summary, map = print_map,
                 emit = attention.emit }

-- ---- how rows lie in teams ------------------------------------------------------------

--- The dtype whose rows are loaded most: that of the cache where K or V is read, else of
-- the largest field.
local function main_dtype(plan)
  if plan.place == "summary" or plan.uses.k or plan.uses.v then return plan.codec end
  local best, most = plan.codec, 0
  for _, field in ipairs(plan.fields) do
    local bytes = field.count * bytes_of(field.dtype)
    if bytes > most then best, most = field.dtype, bytes end
  end
  return best
end

--- Whether any value has the dimension dim.
local function has_rows(plan)
  local has, seen = false, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      has = has or expression.has_dim(x.dims, "dim")
    end, seen)
  end
  return has
end

local function lay_out(self)
  local plan, dim = self.plan, self.plan.sizes.dim
  if not has_rows(plan) then -- a thread is a team
    self.vec, self.chunks, self.team, self.each, self.partial = 1, 1, 1, 1, false
    return
  end
  local vec = 16 / math.min(bytes_of(main_dtype(plan)), 4)
  while dim % vec ~= 0 do vec = vec / 2 end
  local chunks, team = dim / vec, 1
  while team < chunks and team < WARP do team = team * 2 end
  self.vec, self.chunks, self.team = vec, chunks, team
  self.each = math.ceil(chunks / team) * vec -- elements of a lane
  self.partial = chunks % team ~= 0
end

--- Whether a node reduces over tokens, and whether queries are combined only with values
-- that differ between blocks.
local function look(plan)
  local over_tokens, alone, varies, seen = false, false, {}, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      over_tokens = over_tokens or x.over == "token"
      local some = x.op == "field" or x.op == "leaf"
        and (x.name == "k" or x.name == "v" or x.name == "block" or x.name == "tokens"
          or x.name == "index")
      local has_q = false
      for _, arg in ipairs(x.args) do
        some = some or varies[arg]
        has_q = has_q or arg.op == "leaf" and arg.name == "q"
      end
      varies[x] = some
      if has_q and not some then alone = true end
    end, seen)
  end
  return over_tokens, alone
end

--- The source of a kernel, and how it is launched: threads, teams of a thread block,
-- items that a team scores at once; or what cuda_products.print and cuda_prompt.print
-- say.
---@param plan kvlab.Plan
---@param target string  "sm_90a"
---@return string source
---@return table launch
function M.print(plan, target)
  local title = {}
  for i, root in ipairs(plan.roots) do
    title[i] = (" * %s = %s"):format(root.name, expression.text(root.node))
  end
  title = ("/* A kernel that kvlab generated.\n%s */\n"):format(table.concat(title, "\n"))
  if plan.place == "prompt" then
    local text, launch = prompt.print(plan, target)
    return title .. text, launch
  end
  local of_products = products.find(plan, target)
  if of_products then
    local text, launch = products.print(of_products)
    return title .. text, launch
  end
  local self = printer.new(plan)
  lay_out(self)
  local over_tokens, alone = look(plan)
  local group = plan.sizes.head
  self.items = (plan.place ~= "score" or over_tokens) and 1
    or shared.items_together(plan, group <= 4 and 4 or 2)
  self.q_shared = plan.place == "score" and plan.uses.q and not alone
    and group * self.each > QUERY_FLOATS or false
  if plan.place == "hook" then
    return title .. attention.hook(self, target), { threads = 1 }
  end
  if plan.place == "emit" then
    self.lanes, self.team, self.partial = "token", 1, false
    while self.team < math.min(plan.sizes.token, WARP) do self.team = self.team * 2 end
    self.each = math.ceil(plan.sizes.token / self.team)
  end
  local teams = THREADS / self.team
  local text = title .. '#include "cuda/expression.cuh"\n\n'
    .. ("enum { TOKENS = %d, DIM = %d, THREADS = %d, TEAM = %d, TEAMS = %d, VEC = %d, "
      .. "ITEMS = %d };\n"):format(plan.sizes.token, plan.sizes.dim, THREADS, self.team,
      teams, self.vec, self.items) .. shared.struct(plan) .. "\n"
    .. PRINTS[plan.place](self)
  return text, { threads = THREADS, teams = teams, items = self.items }
end

return M
