--- Prints a score in CUDA whose rows lie in the lanes of teams. A team scores several
-- blocks at once, so that enough bytes are under way, and all query heads of a group read
-- a row that was loaded once.
local shared = require "kvlab.kernel.print.c_text"
local printer = require "kvlab.kernel.print.cuda_printer"

local bytes_of, indented = shared.bytes_of, shared.indented
local fixed_lines, item_of, row_lines = printer.fixed_lines, printer.item_of,
  printer.row_lines
local M = {}

local SCORE = [[
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int kv_heads = (int)a->kv_heads, kv_head = blockIdx.x %% kv_heads;
  const int64_t seq = blockIdx.y, width = a->width;
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS;
  const int64_t first = blockIdx.x / kv_heads * a->each;
  const int64_t stop = first + a->each < width ? first + a->each : width;
  const int32_t *table = (const int32_t *)a->tables + seq * width;
  const int32_t *last = (const int32_t *)a->last;
  float *scores = (float *)a->scores + (seq * kv_heads + kv_head) * width;
  const int64_t q_row = ((last ? last[seq] : seq) * kv_heads + kv_head) * %d;
%s  auto look = [&](int64_t at) { return at < stop && at < blocks ? table[at] : -1; };
%s  for (int64_t base = first; base < stop; base += TEAMS * ITEMS) {
%s  }
}
]]

--- The first lines for block u of those that a team scores in one iteration. They expect
-- its entry of the block table in the variable found_u, or in found if there is only one
-- block.
local function item_lines(self, u)
  local item, lines = self.items > 1 and "_" .. u or "", {}
  local function line(text) lines[#lines + 1] = (text:gsub("@", item)) end
  line(("const int64_t at@ = base + %d * TEAMS + team;"):format(u))
  line "const bool known@ = found@ >= 0 && found@ < a->rows;"
  line "const int64_t physical@ = known@ ? found@ : 0;"
  line "const int block@ = (int)at@, tokens@ = min_i32(TOKENS, length - block@ * TOKENS);"
  row_lines(self.plan, lines, "physical" .. item, item)
  return lines
end

--- Rows of fields are loaded one iteration ahead, and their blocks are looked up two
-- iterations ahead, so that a team computes while it waits for memory. Returns the lines
-- before the loop and those at its start.
local function pipeline(self)
  local before, start = {}, {}
  local function add(list, text, ...) list[#list + 1] = text:format(...) end
  local step = "TEAMS * ITEMS"
  for u = 0, self.items - 1 do
    local item = self.items > 1 and "_" .. u or ""
    add(before, "int ahead%s = look(first + %d * TEAMS + team), soon%s = -1;", item, u,
      item)
  end
  for _, one in ipairs(self.streams) do
    add(before, "chunk<%d> %s_soon;", one.bytes, one.name)
  end
  add(before, "auto fetch = [&](int64_t base) {")
  for u = 0, self.items - 1 do
    local item, lines = self.items > 1 and "_" .. u or "", {}
    add(before, "  soon%s = ahead%s;", item, item)
    add(before, "  ahead%s = look(base + %s + %d * TEAMS + team);", item, step, u)
    add(before, "  const int64_t row%s = soon%s >= 0 && soon%s < a->rows ? soon%s : 0;",
      item, item, item, item)
    for _, field in ipairs(self.plan.fields) do
      add(lines, "const char *field_%s%s = (const char *)a->field_%s + "
        .. "(row%s * kv_heads + kv_head) * %d;", field.name, item, field.name, item,
        field.count * bytes_of(field.dtype))
    end
    for _, text in ipairs(lines) do add(before, "  %s", text) end
  end
  for _, one in ipairs(self.streams) do
    local text = one.load:gsub("^" .. one.name, one.name .. "_soon")
    if self.partial then
      add(before, "  if (lane + %d < %d) %s else %s_soon.clear();", one.chunk * self.team,
        self.chunks, text, one.name)
    else
      add(before, "  %s", text)
    end
  end
  add(before, "};")
  add(before, "fetch(first);")
  for u = 0, self.items - 1 do
    local item = self.items > 1 and "_" .. u or ""
    add(start, "const int found%s = soon%s;", item, item)
  end
  for _, one in ipairs(self.streams) do
    add(start, "const chunk<%d> %s = %s_soon;", one.bytes, one.name, one.name)
  end
  add(start, "fetch(base + %s);", step)
  return before, start
end

local Q_SHARED = [[
__shared__ float q_shared[%d];
for (int i = threadIdx.x; i < %d; i += THREADS) {
  const int head = i / DIM, d = i %% DIM, chunk = d / VEC;
  q_shared[(head * %d + chunk / TEAM * VEC + d %% VEC) * TEAM + chunk %% TEAM] =
      q_at(a, q_row + i);
}
__syncthreads();]]

--- The kernel, without its head.
function M.print(self)
  local plan = self.plan
  self.streams = {}
  local fixed, block = shared.body(self, function(s)
    local root = plan.roots[1].node
    for u = 0, self.items - 1 do
      local bind = self.items > 1 and { item = self:element("item", u) } or {}
      local text = s:value(root, bind)
      local item = item_of(bind)
      s:line(("if (lane == 0 && at%s < stop) scores[at%s] = known%s ? (float)(%s) : "
        .. "-INFINITY;"):format(item, item, item, text))
    end
  end)
  local before, starts = pipeline(self)
  for u = 0, self.items - 1 do
    for _, text in ipairs(item_lines(self, u)) do starts[#starts + 1] = text end
  end
  local first = fixed_lines(plan)
  if self.q_shared then
    local head, dim = plan.sizes.head, plan.sizes.dim
    first[#first + 1] = Q_SHARED:format(head * self.each * self.team, head * dim,
      self.each)
  end
  return printer.Q_AT .. SCORE:format(plan.sizes.head * plan.sizes.dim,
    indented(first, "  ") .. indented(fixed, "  "), indented(before, "  "),
    indented(starts, "    ") .. indented(block, "    "))
end

--- Lines that store an element of a field; of dim, a chunk once its last element is

return M
