--- Prints C code for what a prefill emits. kernels/cpu/attention/emission.h has the code
-- that does not depend on the expressions.
local c_printer = require "kvlab.kernel.print.c_printer"
local c_text = require "kvlab.kernel.print.c_text"
local expression = require "kvlab.kernel.expression.expression"
local schedule = require "kvlab.kernel.print.schedule"

local indented = c_text.indented
local M = {}

-- A thread takes a few blocks and all queries that see them, a tile at a time. So a
-- block's sum has one order, whatever the number of threads.
local PROMPT = [[
enum {
  TOKENS = %d, GROUP = %d, DIM = %d, CELLS = %s,
  BLOCKS = PRODUCT_LANES / TOKENS > 1 ? PRODUCT_LANES / TOKENS : 1,
  COLUMNS = (BLOCKS * TOKENS + VF - 1) / VF * VF,
  QUERIES = 64 / GROUP > 1 ? 64 / GROUP : 1,
};
%s
%s
/* The KV head's blocks from entry `first` of the list on: of[b] is a logical block whose
 * keys are in the columns, or -1. Returns the lowest of them, or -1. */
static int take_blocks(const struct arguments *a, const struct emission *e, int64_t seq,
                       int64_t kv_head, int64_t first, int *of) {
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS;
  const int32_t *table = (const int32_t *)a->tables + seq * a->width;
  const int32_t *selection = a->selection, *slots = a->slots;
  if (selection)
    selection += (seq * a->selection_heads + kv_head %% a->selection_heads) * a->entries;
  if (slots) slots += (seq * a->slot_heads + kv_head %% a->slot_heads) * a->entries;
  int lowest = -1;
  for (int b = 0; b < BLOCKS; b++) {
    const int64_t entry = first + b;
    of[b] = -1;
    if (entry >= a->entries) continue;
    const int block = selection ? selection[entry] : (int)entry;
    if (block < 0 || block >= blocks || block >= a->width) continue;
    const int64_t physical = slots ? slots[entry] : table[block];
    if (physical < 0 || physical >= a->rows) continue;
    of[b] = block;
    if (lowest < 0 || block < lowest) lowest = block;
    emission_keys(e, &a->cache.key, kvl__keys_of(&a->cache, physical, kv_head),
                  min_i32(TOKENS, length - block * TOKENS), b * TOKENS, %s);
  }
  return lowest;
}

/* The scores of n queries, before bias, mask and log_weight. */
static void take_queries(const struct arguments *a, const struct emission *e,
                         int64_t first, int index0, int64_t kv_head, const int *of,
                         const int *at, int n) {
  const float *unit = a->cache.k_scale, *alibi = a->alibi, cap = (float)a->soft_cap;
  float factor = (float)a->scale * (unit ? unit[kv_head] : 1);
  if (cap > 0) factor /= cap;
  for (int i = 0; i < n * GROUP; i++)
    emission_query(e, a->q,
                   (((first + at[i / GROUP]) * a->kv_heads + kv_head) * GROUP +
                    i %% GROUP) * DIM,
                   i, factor, (int)a->q_dtype);
  emission_scores(e, n * GROUP, cap);
  for (int i = 0; alibi && i < n * GROUP; i++) {
    const float slope = alibi[kv_head * GROUP + i %% GROUP];
    for (int b = 0; b < BLOCKS; b++) {
      const int far = kvl__apart(of[b] * TOKENS, index0 + at[i / GROUP]);
      float *scores = e->scores + i * COLUMNS + b * TOKENS;
      for (int t = 0; t < TOKENS; t++) scores[t] += slope * (float)(far + t);
    }
  }
}

static int piece(const void *arguments, int64_t begin, int64_t end) {
  const struct arguments *a = arguments;
  const int64_t pairs = a->seqs * a->kv_heads;
  struct emission e;
  float *memory = emission_open(&e, DIM, COLUMNS, QUERIES * GROUP);
  if (!memory) return KVL_ERR_NO_MEMORY;
  for (int64_t item = begin; item < end; item++) { /* first blocks have most queries */
    const int64_t run = item / pairs, row = item %% pairs;
    const int64_t seq = row / a->kv_heads, kv_head = row %% a->kv_heads;
    const int length = ((const int32_t *)a->lens)[seq];
    const int64_t first = ((const int32_t *)a->starts)[seq];
    const int rows = (int)(((const int32_t *)a->starts)[seq + 1] - first);
    const int blocks = (length + TOKENS - 1) / TOKENS, index0 = length - rows;
    int of[BLOCKS], at[QUERIES];
    const int lowest =
        rows > 0 ? take_blocks(a, &e, seq, kv_head, run * BLOCKS, of) : -1;
    if (lowest < 0) continue;
    double sums[BLOCKS][CELLS];
    for (int b = 0; b < BLOCKS; b++) {
%s    }
%s    for (int query = max_i32(0, lowest * TOKENS - index0); query < rows;) {
      int n = 0;
      for (; query < rows && n < QUERIES; query++)
        if (needed(a, (int)kv_head, length, blocks, index0 + query)) at[n++] = query;
      if (n == 0) break;
      take_queries(a, &e, first, index0, kv_head, of, at, n);
      for (int i = 0; i < n; i++) {
        const int query_index = index0 + at[i];
        const int seen_from = kvl__window_begin((int)a->window, query_index);
        const float *lse =
            (const float *)a->lse + ((first + at[i]) * a->kv_heads + kv_head) * GROUP;
        (void)seen_from;
%s        for (int b = 0; b < BLOCKS; b++) {
          const int block = of[b];
          const int tokens = min_i32(TOKENS, query_index + 1 - block * TOKENS);
          if (block < 0 || tokens <= 0) continue;
          const float *logits = e.scores + (int64_t)i * GROUP * COLUMNS + b * TOKENS;
          (void)logits, (void)lse;
%s        }
      }
    }
    for (int b = 0; b < BLOCKS; b++) {
      if (of[b] < 0) continue;
      const int64_t to = row * a->width + of[b];
%s    }
  }
  free(memory);
  return 0;
}

__attribute__((visibility("default"))) int kvl_code(const void *arguments, void *queue) {
  const struct arguments *a = arguments;
  (void)queue;
  const int64_t runs = (a->entries + BLOCKS - 1) / BLOCKS;
  return kvl__split(a->seqs * a->kv_heads * runs, 1, piece, a);
}
]]

local QUERY_VALUE = [[
static %s %s(const struct arguments *a, int kv_head, int length, int blocks,
%s int query_index) {
%s}
]]

--- The functions that compute values which depend only on a query; `needed` says whether
-- a query can add anything.
local function query_functions(self)
  local plan, texts = self.plan, {}
  local function add(name, kind, lines)
    kind = c_text.TYPES[kind]
    texts[#texts + 1] = QUERY_VALUE:format(kind, name, (" "):rep(#kind + #name + 8),
      indented(lines, "  "))
  end
  for _, value in ipairs(plan.query_values) do
    local s = schedule.new(self, plan.sizes)
    s:take({ value.node }, expression.each)
    s.block_level = schedule.FIXED
    local text, lines = s:value(value.node, {}), c_printer.fixed_lines(plan)
    for _, line in ipairs(s.scopes[schedule.FIXED].lines) do lines[#lines + 1] = line end
    lines[#lines + 1] = ("return %s;"):format(text)
    add(value.name == "needed" and "needed" or "compute_" .. value.name, value.node.type,
      lines)
  end
  if not plan.needed then add("needed", "bool", { "return 1;" }) end
  return table.concat(texts, "\n")
end

--- The source of a kernel, without its title and its first header.
---@param self kvlab.PrinterC
---@return string
function M.print(self)
  local plan, starts, ends, cells = self.plan, {}, {}, "0"
  local first = {} -- cell of each root among those of a block
  for i, root in ipairs(plan.roots) do
    local own, at = c_text.cells(root), cells
    first[root], cells = at, cells .. " + " .. own
    starts[i] = ("for (int t = 0; t < %s; t++) sums[b][%s + t] = %s;"):format(own, at,
      c_text.nothing(root))
    ends[#ends + 1] = ("for (int t = 0; t < %s; t++)"):format(own)
    ends[#ends + 1] = ("  ((float *)a->emit_%s)[to * %s + t] = (float)sums[b][%s + t];")
      :format(root.name, own, at)
  end
  local fixed, block = c_text.body(self, function(s)
    for _, root in ipairs(plan.roots) do
      local text = c_printer.emitted(s, root)
      s:line(("for (int t = 0; t < %s; t++) {"):format(root.by_token and "tokens" or "1"))
      s:line(("  double *sum = &sums[b][%s + t];"):format(first[root]))
      s:line((root.join == "max" and "  if (%s > *sum) *sum = %s;" or "  *sum += %s;")
        :format(text, text))
      s:line "}"
    end
  end)
  local lines = c_printer.fixed_lines(plan)
  for _, text in ipairs(c_text.input_lines(plan, "seq", "row")) do
    lines[#lines + 1] = text
  end
  return '#include "cpu/attention/emission.h"\n\n' .. PROMPT:format(plan.sizes.token,
    plan.sizes.head, plan.sizes.dim, cells, c_text.struct(plan) .. "\n",
    query_functions(self), c_text.NUMBERS[plan.codec], indented(starts, "      "),
    indented(lines, "    ") .. indented(fixed, "    "),
    indented(c_text.query_value_lines(plan), "        "),
    indented(block, "          "),
    indented(ends, "      "))
end

return M
