--- Prints a kernel in C, from its plan. What it calls is in kernels/cpu/expression.h;
-- threads share the work as in every CPU kernel.
local c_printer = require "kvlab.kernel.print.c_printer"
local c_prompt = require "kvlab.kernel.print.c_prompt"
local c_text = require "kvlab.kernel.print.c_text"
local expression = require "kvlab.kernel.expression.expression"
local pages = require "kvlab.tensor.pages"
local schedule = require "kvlab.kernel.print.schedule"

local VECTORS, MEMORY, NUMBERS = c_text.VECTORS, c_text.MEMORY, c_text.NUMBERS
local bytes_of, item_of, struct = c_text.bytes_of, c_text.item_of, c_text.struct
local strip_bytes = pages.strip_bytes
local body, indented, input_lines = c_text.body, c_text.indented, c_text.input_lines
local fixed_lines = c_printer.fixed_lines
local widen, heads_unrolled = c_text.widen, c_text.heads_unrolled
local M = {}

-- How many blocks a thread scores at once, and how many blocks ahead it prefetches rows:
-- rows of fields, and rows of K, which are longer.
local RUN_BLOCKS, SOON, SOON_KEYS = 1024, 4, 2

-- ---- the kernel -----------------------------------------------------------------------

--- Whether loops over dim can use vectors: depends on its size, and the types along it.
local function can_use_vectors(plan, lanes)
  local fits = plan.sizes.dim % lanes == 0
  local ok, seen = fits or plan.place == "prompt", {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      if expression.has_dim(x.dims, "dim") then
        ok = ok and fits
        if not VECTORS[x.type] then ok = false end
        if x.op == "const" and x.stored[#x.stored] ~= "dim" then ok = false end
      end
      if x.op == "pack" and x.over == "dim" then ok = false end
    end, seen)
  end
  return ok
end

--- Whether loops over tokens can use vectors: depends on the types, and on what is read.
local function can_use_key_vectors(plan)
  local ok, seen = true, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      local of_key = expression.has_dim(x.dims, "token")
      if of_key and (not VECTORS[x.type] or x.op == "const") then ok = false end
    end, seen)
  end
  return ok
end

--- Which reductions over tokens can be done in vectors, and whether there are any.
local function vectors_over_tokens(plan)
  local can, some, along, seen = {}, false, {}, {}
  for _, root in ipairs(plan.roots) do
    expression.each(root.node, function(x)
      -- along[x]: what x reads at one token is a number, or a vector over tokens
      local fine = VECTORS[x.type] ~= nil and not expression.has_dim(x.dims, "dim")
      if x.op == "const" and expression.has_dim(x.dims, "token") then fine = false end
      if x.op == "field" and expression.has_dim(x.dims, "token") then fine = false end
      if x.op == "pack" then fine = false end
      local inner = x.over == "dim" -- comes from an array
      for _, arg in ipairs(x.args) do fine = fine and (inner or along[arg]) end
      for _, dim in ipairs(x.dims) do
        if dim ~= "token" and dim ~= "head" then fine = false end
      end
      along[x] = fine
      if x.over == "token" then
        some = true
        can[x] = along[x.args[1]] and plan.sizes.head <= heads_unrolled(plan)
      end
    end, seen)
  end
  return can, some
end

--- Whether loops over tokens use vectors because an emit has a number for each token.
local function emits_in_vectors(plan, token_vectors)
  local by_token, ok, seen = false, true, {}
  for _, root in ipairs(plan.roots) do
    by_token = by_token or root.by_token or false
    expression.each(root.node, function(x)
      if x.over == "token" and not token_vectors[x] then ok = false end
    end, seen)
  end
  return by_token and ok
end

local Q_LOADS = [[
static inline KVL_HOT float q_load_one(const struct arguments *a, int64_t i) {
  return f32_load(a->q, i, (int)a->q_dtype);
}
static inline KVL_HOT vf q_load(const struct arguments *a, int64_t i) {
  float x[VF];
  for (int j = 0; j < VF; j++) x[j] = q_load_one(a, i + j);
  return load_f32_vf(x);
}
]]

--- The function that finds the strip of a leaf in a page (kernels/page.h).
local STRIPS = { { "k", "kvl__keys_of" }, { "v", "kvl__values_of" } }

--- Lines at the start of a block whose physical number is `block`.
local function row_lines(plan, block, item)
  local uses, lines = plan.uses, {}
  for _, one in ipairs(STRIPS) do
    local name, strip = one[1], one[2]
    if uses[name] then
      lines[#lines + 1] = ("const void *%s_row%s = %s(&a->cache, %s, kv_head);"):format(
        name, item, strip, block)
    end
  end
  for _, field in ipairs(plan.fields) do
    lines[#lines + 1] = ("const void *field_%s%s = (const char *)a->field_%s + (%s * "
      .. "a->kv_heads + kv_head) * %d;"):format(field.name, item, field.name, block,
      field.count * bytes_of(field.dtype))
  end
  return lines
end

--- Prefetches the rows of block `next`; is_walked: K is prefetched in a loop over tokens.
local function prefetch_lines(plan, is_walked)
  local lines = {}
  for _, one in ipairs(STRIPS) do
    local name, strip = one[1], one[2]
    if plan.uses[name] and not (is_walked and name == "k") then
      lines[#lines + 1] = ("soon(%s(&a->cache, next, kv_head), %d);"):format(strip,
        strip_bytes(plan))
    end
  end
  for _, field in ipairs(plan.fields) do
    local bytes = field.count * bytes_of(field.dtype)
    lines[#lines + 1] =
      ("soon((const char *)a->field_%s + (next * a->kv_heads + kv_head) "
      .. "* %d, %d);"):format(field.name, bytes, bytes)
  end
  return lines
end

local SCORE = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *tables = a->tables, *lens = a->lens, *last = a->last;
  const int64_t runs = (a->width + RUN_BLOCKS - 1) / RUN_BLOCKS;
  for (int64_t item = begin; item < end; item++) {
    const int64_t seq = item / runs / a->kv_heads, kv_head = item / runs %% a->kv_heads;
    const int64_t first = item %% runs * RUN_BLOCKS;
    const int length = lens[seq], blocks = (length + TOKENS - 1) / TOKENS;
    const int64_t stop = i64_min(first + RUN_BLOCKS, a->width);
    const int64_t valid = i64_max(first, i64_min(stop, blocks));
    const int32_t *table = tables + seq * a->width;
    float *scores = (float *)a->scores + (seq * a->kv_heads + kv_head) * a->width;
    const int64_t q_row = ((last ? last[seq] : seq) * a->kv_heads + kv_head) * %d;
    (void)q_row;
%s%s    for (int64_t base = first; base < valid; base += ITEMS) {
%s%s    }
    for (int64_t at = valid; at < stop; at++) scores[at] = -INFINITY;
  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  const int64_t runs = (a->width + RUN_BLOCKS - 1) / RUN_BLOCKS;
  return kvl__split(a->seqs * a->kv_heads * runs, 1, piece, a);
}
]]

local SUMMARY = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *from = a->k_blocks, *to = a->blocks, *counts = a->counts;
  for (int64_t item = begin; item < end; item++) {
    const int64_t kv_head = item %% a->kv_heads, entry = item / a->kv_heads;
    const int64_t physical = from[entry], row = to[entry];
    if (physical < 0 || physical >= a->cache.blocks) continue;
    if (row < 0 || row >= a->rows) continue;
    const int tokens = (int)i64_max(0, i64_min(counts[entry], TOKENS));
    (void)tokens;
%s    if (item + 1 < end) {
      const int64_t next = from[(item + 1) / a->kv_heads];
      const int64_t next_head = (item + 1) %% a->kv_heads;
      if (next >= 0 && next < a->cache.blocks) {
%s      }
    }
%s%s%s  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->n * a->kv_heads, kvl__grain_rows(TOKENS * DIM), piece, a);
}
]]

local MAP = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  for (int64_t item = begin; item < end; item++) {
    const int64_t seq = item / a->heads, kv_head = item %% a->heads;
    const int length = ((const int32_t *)a->lens)[seq];
    const int blocks = (int)(((int64_t)length + a->block_size - 1) / a->block_size);
    float *out = (float *)a->out + item * a->width;
    (void)kv_head, (void)blocks;
%s%s    for (int block = 0; block < (int)a->width; block++) {
%s    }
  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->seqs * a->heads, kvl__grain_rows(a->width), piece, a);
}
]]

local HOOK = [[
__attribute__((visibility("default"))) void kvl_code_hook(const void *arguments,
                                                          const struct kvl_hook_row *row,
                                                          const int32_t *indices,
                                                          int tokens, float *scores) {
  const struct arguments *a = arguments;
  const int head = row->head, kv_head = row->kv_head, length = row->length;
  const int query_index = row->query_index, blocks = (length + TOKENS - 1) / TOKENS;
  (void)a, (void)head, (void)kv_head, (void)query_index, (void)blocks;
%s}
]]

local EMIT = [[
static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int32_t *lens = a->lens;
  const int64_t stride = a->width * TOKENS;
  for (int64_t item = begin; item < end; item++) {
    const int64_t entry = item %% a->entries, row = item / a->entries;
    const int64_t seq = row / a->kv_heads, kv_head = row %% a->kv_heads;
    const int32_t *selection = a->selection;
    if (selection)
      selection +=
          (seq * a->selection_heads + kv_head %% a->selection_heads) * a->entries;
    const int length = lens[seq], blocks = (length + TOKENS - 1) / TOKENS;
    const int block = selection ? selection[entry] : (int)entry;
    float *out = (float *)a->out + row * a->width * CELLS;
    for (int cell = 0; !selection && block >= blocks && cell < CELLS; cell++)
      out[entry * CELLS + cell] = %s;
    if (block < 0 || block >= blocks || block >= a->width) continue;
    const int tokens = (int)i64_min(TOKENS, length - block * TOKENS);
    const int query_index = length - 1;
    const int seen_from = kvl__window_begin((int)a->window, query_index);
    const float *scores = (const float *)a->scores + row * GROUP * stride;
    const float *lse = (const float *)a->lse + row * GROUP;
    (void)kv_head, (void)tokens, (void)query_index;
%s  }
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  return kvl__split(a->seqs * a->kv_heads * a->entries, kvl__grain_rows(TOKENS * GROUP),
                    piece, a);
}
]]

--- The statement that stores a field's element.
local function store(root, at, text, vector, block)
  local p = ("(char *)a->field_%s + (%s * a->kv_heads + kv_head) * %d"):format(root.name,
    block, root.count * bytes_of(root.dtype))
  local kind = root.node.type
  if NUMBERS[root.dtype] then
    return (vector and "vf_store(%s, %s, %s, %s);"
      or "f32_store(%s, %s, %s, %s);"):format(
      p, at, text, NUMBERS[root.dtype])
  end
  local typed = ("(%s *)(%s) + %s"):format(kind == "u32" and "uint32_t"
    or MEMORY[root.dtype], p, at)
  if vector then return ("store_%s_%s(%s, %s);"):format(kind, VECTORS[kind], typed,
    text) end
  return ("*(%s) = %s;"):format(typed, text)
end

--- The start of every block that is scored in one iteration. An index past the last
-- block, or of no block, reads some other block, and its score is not used.
local function item_lines(self, u)
  local item, lines = self.items > 1 and "_" .. u or "", {}
  local function line(text) lines[#lines + 1] = (text:gsub("@", item)) end
  line(("const int64_t at@ = i64_min(base + %d, valid - 1);"):format(u))
  line "const int64_t next@ = table[i64_min(at@ + SOON, valid - 1)];"
  line "if (next@ >= 0 && next@ < a->rows) {"
  for _, text in ipairs(prefetch_lines(self.plan, self.asks_for_keys)) do
    lines[#lines + 1] = "  " .. text:gsub("next", "next" .. item)
  end
  line "}"
  line "const int found@ = table[at@];"
  line "const int known@ = found@ >= 0 && found@ < a->rows;"
  line "const int64_t physical@ = known@ ? found@ : 0;"
  line "const int block@ = (int)at@;"
  line "const int tokens@ = (int)i64_min(TOKENS, length - at@ * TOKENS);"
  for _, text in ipairs(row_lines(self.plan, "physical" .. item, item)) do
    lines[#lines + 1] = text
  end
  if self.asks_for_keys then
    line "const char *k_soon = next >= 0 && next < a->rows"
    line "  ? kvl__keys_of(&a->cache, next, kv_head) : (const char *)k_row;"
  end
  return lines
end

local function print_score(self)
  local plan, starts = self.plan, {}
  if plan.uses.k and self.items == 1 then
    self.key_bytes = strip_bytes(plan) / plan.sizes.token
  end
  local fixed, block = body(self, function(s)
    local root = plan.roots[1]
    for u = 0, self.items - 1 do
      local bind = self.items > 1 and { item = self:element("item", u) } or {}
      local text, item = s:value(root.node, bind), item_of(bind)
      s:line(("scores[at%s] = known%s ? (float)(%s) : -INFINITY;"):format(item, item,
        text))
    end
  end)
  for u = 0, self.items - 1 do
    for _, text in ipairs(item_lines(self, u)) do starts[#starts + 1] = text end
  end
  return ("enum { RUN_BLOCKS = %d, SOON = %d, TOKENS = %d, ITEMS = %d };\n"):format(
      RUN_BLOCKS, self.asks_for_keys and SOON_KEYS or SOON, plan.sizes.token, self.items)
    .. struct(plan) .. "\n" .. Q_LOADS
    .. SCORE:format(plan.sizes.head * plan.sizes.dim,
      indented(fixed_lines(plan), "    "), indented(fixed, "    "),
      indented(starts, "      "), indented(block, "      "))
end

--- Prefetches K and V of the next block; K in the loop over tokens, if there is one.
local function next_lines(self)
  local plan, lines = self.plan, {}
  for _, one in ipairs(STRIPS) do
    local name, strip = one[1], one[2]
    if plan.uses[name] then
      local at = strip .. "(&a->cache, next, next_head)"
      lines[#lines + 1] = name == "k" and self.asks_for_keys
        and ("k_soon = %s;"):format(at)
        or ("soon(%s, %d);"):format(at, strip_bytes(plan))
    end
  end
  return lines
end

local function print_summary(self)
  local plan = self.plan
  if plan.uses.k then self.key_bytes = strip_bytes(plan) / plan.sizes.token end
  local fixed, block = body(self, function(s)
    local by_dims, order = {}, {}
    for _, root in ipairs(plan.roots) do
      local key = table.concat(root.node.dims, ",")
      if not by_dims[key] then order[#order + 1] = key end
      by_dims[key] = by_dims[key] or {}
      table.insert(by_dims[key], root)
    end
    for _, key in ipairs(order) do
      local dims = by_dims[key][1].node.dims
      s:over(dims, function(bind)
        for _, root in ipairs(by_dims[key]) do
          local vector = bind.dim and bind.dim.vector
          s:line(store(root, s:index(dims, bind), s:value(root.node, bind), vector,
            "row"))
        end
      end)
    end
  end)
  return ("enum { TOKENS = %d, DIM = %d };\n"):format(plan.sizes.token, plan.sizes.dim)
    .. struct(plan) .. "\n"
    .. SUMMARY:format(
      self.asks_for_keys and "    const char *k_soon = a->cache.memory;\n" or "",
      indented(next_lines(self), "        "),
      indented(fixed_lines(plan), "    ") .. indented(fixed, "    "),
      indented(row_lines(plan, "physical", ""), "    "), indented(block, "    "))
end

local function print_map(self)
  local plan = self.plan
  local fixed, block = body(self, function(s)
    local text = s:value(plan.roots[1].node, {})
    s:line(("out[block] = %s;"):format(text))
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "seq", "item")) do lines[#lines + 1] = text end
  return struct(plan) .. "\n" .. MAP:format(indented(lines, "    "),
    indented(fixed, "    "), indented(block, "      "))
end

--- A hook reads scores[t], changes them and writes them back, for each key or each VF.
local function print_hook(self)
  local plan = self.plan
  local s, roots = schedule.new(self, plan.sizes), {}
  for i, root in ipairs(plan.roots) do roots[i] = root.node end
  s:take(roots, expression.each)
  s.block_level = schedule.BLOCK
  s:over({ "token" }, function(bind)
    local vector, score = bind.token.vector, s:name "score"
    local at = ("scores%s%s"):format(vector and " + " or "[", self.key)
    s:line(vector and ("vf %s = load_f32_vf(%s);"):format(score, at)
      or ("float %s = %s];"):format(score, at))
    for _, root in ipairs(plan.roots) do
      local text = s:value(root.node, bind)
      if root.name == "add" then s:line(("%s += %s;"):format(score, text))
      elseif vector then
        s:line(("%s = vf_select(%s, %s, vf_set(-INFINITY));"):format(score,
          widen(text, "bool", expression.has_dim(root.node.dims, "token")), score))
      else s:line(("if (!(%s)) %s = -INFINITY;"):format(text, score)) end
    end
    s:line(vector and ("vf_store(%s, %s, %s, KVL_DTYPE_F32);"):format("scores", self.key,
      score) or ("%s] = %s;"):format(at, score))
  end, { head = { text = "head", level = schedule.FIXED } })
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "row->seq",
    "(row->seq * row->kv_heads + kv_head)")) do
    lines[#lines + 1] = text
  end
  return ('#include "hook.h"\n\nenum { TOKENS = %d };\n'):format(plan.sizes.token)
    .. struct(plan) .. "\n" .. HOOK:format(indented(lines, "  ")
      .. indented(s.scopes[schedule.FIXED].lines, "  "))
end

local function print_emit(self)
  local plan, root = self.plan, self.plan.roots[1]
  local fixed, block = body(self, function(s)
    local text = c_printer.emitted(s, root)
    s:line((root.by_token and "for (int t = 0; t < TOKENS; t++) out[block * TOKENS + t] "
      .. "= t < tokens ? %s : %s;" or "out[block] = %s;"):format(text,
      c_text.nothing(root)))
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(input_lines(plan, "seq", "row")) do lines[#lines + 1] = text end
  return ("enum { TOKENS = %d, GROUP = %d, CELLS = %s };\n"):format(plan.sizes.token,
      plan.sizes.head, c_text.cells(root)) .. struct(plan) .. "\n"
    .. EMIT:format(c_text.nothing(root), indented(lines, "    ")
      .. indented(fixed, "    ") .. indented(block, "    "))
end

local PRINTS = { score = print_score, summary = print_summary, map = print_map,
                 hook = print_hook, emit = print_emit, prompt = c_prompt.print }

--- The source of a kernel.
---@param plan kvlab.Plan
---@param lanes integer  floats in a vector of the instruction set
---@return string
function M.print(plan, lanes)
  local self = c_printer.new { plan = plan, vectors = can_use_vectors(plan, lanes),
                              lanes = lanes, tokens = "tokens" }
  local over_tokens
  self.token_vectors, over_tokens = vectors_over_tokens(plan)
  self.keys_in_vectors = can_use_key_vectors(plan)
    and (plan.place == "hook" or emits_in_vectors(plan, self.token_vectors))
  self.items = plan.place == "score" and self.vectors and not over_tokens
    and c_text.items_together(plan, math.floor(lanes / plan.sizes.head)) or 1
  local title = {}
  for i, root in ipairs(plan.roots) do
    title[i] = (" * %s = %s"):format(root.name, expression.text(root.node))
  end
  return ("/* A kernel that kvlab generated.\n%s */\n"):format(table.concat(title, "\n"))
    .. '#include "cpu/expression.h"\n\n' .. PRINTS[plan.place](self)
end

return M
