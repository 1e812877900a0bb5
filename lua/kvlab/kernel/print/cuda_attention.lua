--- Prints kernels of attention in CUDA: a hook, which is compiled into the hand-written
-- decode and prefill kernels, and what attention emits for each
-- block or token.
local shared = require "kvlab.kernel.print.c_text"
local printer = require "kvlab.kernel.print.cuda_printer"
local pages = require "kvlab.tensor.pages"

local fixed_lines, indented = printer.fixed_lines, shared.indented
local M = {}

local HOOK = [=[
struct policy_hook {
  static constexpr bool ACTIVE = true, HIDES = %s, KEEPS = %s;
  float *scores;
  int64_t room;
  arguments args;

  __device__ __forceinline__ float operator()(float score, const kvl::hook_row &row,
                                              int index) const {
    const arguments *a = &args;
    [[maybe_unused]] const int head = row.head, kv_head = row.kv_head;
    [[maybe_unused]] const int length = row.length, query_index = row.query_index;
    [[maybe_unused]] const int blocks = (length + TOKENS - 1) / TOKENS;
    [[maybe_unused]] const int block = index / TOKENS, token = index %% TOKENS;
    [[maybe_unused]] const float logit = score * kvl::LN2;
%s    return score;
  }
};

]=]

-- The kernels of attention that are compiled with a hook: header, then the kernel, whose
-- name is what kernels/cuda/attention/paged_attention.cu asks for.
local DECODE = [[
extern "C" __global__ void __maxnreg__((kvl::decode_shape<%d, %s, %d>::REGISTERS))
    decode_%s_%d%s(const __grid_constant__ kvl_paged_attention_args a,
                   const __grid_constant__ kvl::split_place place,
                   const __grid_constant__ policy_hook hook) {
  kvl::decode<%s, %d, %s, %d>(a, place, hook);
}
]]
local PREFILL = [[
extern "C" __global__ void __launch_bounds__(kvl::prefill_shape<%d>::THREADS, 1)
    prefill_%s_%d%s(const __grid_constant__ kvl_paged_attention_args a, int subgroups,
                    const __grid_constant__ kvl::prefill_parts parts,
                    const __grid_constant__ policy_hook hook) {
  kvl::prefill<%s, %d, %s>(a, subgroups, parts, hook);
}
]]
-- After each of them.
local MEND = [[

#include "cuda/attention/paged_mend.cuh"
extern "C" __global__ void __launch_bounds__(kvl::MEND_WARPS *kvl::WARP)
    mend_%s%s(const __grid_constant__ kvl_paged_attention_args a, const uint8_t *notes,
              const __grid_constant__ policy_hook hook) {
  kvl::mend_rows<%s, %s, %d>(a, notes, hook);
}
]]
-- On Hopper.
local WGMMA = [[
using shape = kvl::wgmma_shape<%d, %s, kvl::WGMMA_%s>;
extern "C" __global__ void __launch_bounds__(shape::THREADS, 1)
    wgmma_%s%s_%d%s(const __grid_constant__ kvl_paged_attention_args a,
                  const __grid_constant__ kvl::wgmma_maps maps,
                  const __grid_constant__ kvl::wgmma_plan plan,
                  const __grid_constant__ policy_hook hook) {
  kvl::wgmma_attention<%s, shape, true>(a, maps, plan, hook);
}
]]
local F32 = [[
extern "C" __global__ void __launch_bounds__(kvl::f32_shape<%s, %d>::WARPS *kvl::WARP, 2)
    f32_%s_%s_%d_%d(const __grid_constant__ kvl_paged_attention_args a,
                    const __grid_constant__ %s,
                    const __grid_constant__ policy_hook hook) {
  kvl::f32_%s<%s, %d, %d>(a, %s, hook);
}
]]

-- Over latents: on Hopper, and everywhere.
local LATENT = [[
using shape = kvl::latent_shape<%d, %s>;
extern "C" __global__ void __maxnreg__(shape::REGISTERS)
    latent_%d_%s%s(const __grid_constant__ kvl_paged_attention_args a,
                   const __grid_constant__ kvl::wgmma_maps maps,
                   const __grid_constant__ kvl::wgmma_plan plan,
                   const __grid_constant__ policy_hook hook) {
  kvl::attend_latents<%s, shape>(a, maps, plan, hook);
}
]]
local LATENT_ROWS = [[
extern "C" __global__ void __launch_bounds__(kvl::LATENT_ROW_WARPS *kvl::WARP)
    latent_%s_%s(const __grid_constant__ kvl_paged_attention_args a,
                 const __grid_constant__ policy_hook hook) {
  kvl::attend_latent_rows<%s, %s>(a, hook);
}
]]

-- Over listed tokens.
local LISTED = [[
extern "C" __global__ void __launch_bounds__(%s, %s)
    %s(const __grid_constant__ kvl_paged_attention_args a,
       const __grid_constant__ kvl::listed_plan plan,
       const __grid_constant__ policy_hook hook) {
  kvl::%s(a, plan, hook);
}
]]
local LISTED_SHAPE = "using shape = kvl::%s;\n"

local CPP = printer.CPP
local LATENT_VALUES = 512 -- latent_shape::D
local SHORT = { f32 = "f32", f16 = "f16", bf16 = "bf16", f8e4m3 = "f8",
                int8 = "int8", f8_latent = "f8_latent" }

--- The smallest of these sizes that takes n.
local function size_for(n, ...)
  for i = 1, select("#", ...) do
    local size = select(i, ...)
    if n <= size then return size end
  end
end

--- Has code for a target large tiles? See kernels/cuda/architecture.cuh.
local function has_large_tiles(target)
  local number = tonumber(target:match "%d+")
  return number >= 90 and number < 120
end

--- The same over listed tokens, with the rules of instances/listed.cu.
local function listed_kernel(dim, group, q, kv, last, mend, target)
  local size = size_for(dim, 64, 128, 256)
  local fits = has_large_tiles(target) or last ~= "" or dim <= 128
  if q == "f32" or not fits then
    local rows = group > 4 and 8 or 4
    return "listed_f32", LISTED_SHAPE:format(("f32_shape<%s, %d>"):format(CPP[kv], size))
      .. LISTED:format("shape::WARPS *kvl::WARP", "2",
        ("f32_listed_%s_%d_%d"):format(SHORT[kv], size, rows),
        ("f32_listed<%s, %d, %d>"):format(CPP[kv], size, rows))
  end
  if pages.CODECS[kv].packs and group <= 8 then
    local shape = ("warps_shape<%d, %s>"):format(size, CPP[kv])
    return "listed_warps", LISTED_SHAPE:format(shape)
      .. LISTED:format("shape::THREADS", "shape::BLOCKS",
        ("listed_warps_%s_%d%s"):format(SHORT[q], size, last),
        ("listed_by_warps<%s, %s, %d>"):format(CPP[q], CPP[kv], size)) .. mend
  end
  local warps = group <= 16 and 1 or group <= 32 and 2 or 4
  return "listed_mma",
    LISTED_SHAPE:format(("listed_shape<%d, %d, %s>"):format(size, warps, CPP[kv]))
    .. LISTED:format("shape::THREADS", "shape::BLOCKS",
      ("listed_%s_%d_%d%s"):format(SHORT[q], size, warps, last),
      ("listed<%s, %s, %d, %d>"):format(CPP[q], CPP[kv], size, warps)) .. mend
end

--- The same over latents, with the rules of instances/latent.cu.
local function latent_kernel(plan, target)
  local q, kv, values = plan.q_dtype, plan.codec, plan.value_dim
  local is_f8 = kv == "f8_latent"
  local fits = is_f8 and values == LATENT_VALUES or kv == q and values <= LATENT_VALUES
  if target ~= "sm_90a" or q == "f32" or not fits then
    return "latent_rows", LATENT_ROWS:format(SHORT[q], SHORT[kv], CPP[q], CPP[kv])
  end
  local is_one = plan.is_listed or not plan.is_prefill -- token for a tile
  local rows = is_one and size_for(plan.sizes.head, 16, 32) or 64
  local last = is_f8 and "_f8_latent" or ""
  return "latent", LATENT:format(rows, tostring(is_f8), rows, SHORT[q], last, CPP[q])
    .. MEND:format(SHORT[q], last, CPP[q], CPP[kv], LATENT_VALUES)
end

--- Chooses the attention kernel for a shape. Returns the name of its header, and the text
-- of its instance with the hook. The rules are those of launch_16bit and launch_f32_dim
-- in paged_attention.cu, of wgmma_takes in wgmma_launch.cuh, and of launch_latent in
-- instances/latent.cu (kernels/cuda/attention).
local function attention_kernel(plan, target)
  local dim, group, q, kv = plan.sizes.dim, plan.sizes.head, plan.q_dtype, plan.codec
  if plan.is_shared then return latent_kernel(plan, target) end
  local is_packed, is_f8 = pages.CODECS[kv].packs, kv == "f8e4m3"
  local last = is_f8 and "_f8" or is_packed and "_int8" or ""
  local mend = MEND:format(SHORT[q], last, CPP[q], CPP[kv], 256)
  if plan.is_listed then
    return listed_kernel(dim, group, q, kv, last, mend, target)
  end
  if q == "f32" then
    local rows = (plan.is_prefill or group > 4) and 8 or 4
    local size = size_for(dim, 64, 128, 256)
    local phase = plan.is_prefill and "prefill" or "decode"
    local second = plan.is_prefill and "subgroups" or "place"
    return "paged_f32", F32:format(CPP[kv], size, phase, SHORT[kv], size, rows,
      plan.is_prefill and "int subgroups" or "kvl::split_place place", phase, CPP[kv],
      size, rows, second)
  end
  if target == "sm_90a" and (plan.is_prefill or group > 16 and not plan.keeps) then
    local element = last == "" and "void" or CPP[kv]
    local size = dim == 96 and 96 or size_for(dim, 64, 128, 192, 256)
    local is_few = not plan.is_prefill
      and (last == "" and group <= 128 or group <= 64 and size <= 192)
    return "paged_wgmma",
      WGMMA:format(size, element, is_few and "HOOKED" or "MANY", is_few and "few_" or "",
        SHORT[q], size, last, CPP[q]) .. mend
  end
  if plan.is_prefill then
    local size = size_for(dim, 64, 96, 128, 192, 256)
    return "paged_prefill", PREFILL:format(size, SHORT[q], size, last, CPP[q], size,
      CPP[kv]) .. mend
  end
  local size = size_for(dim, 64, 128, 256)
  local rows = is_packed and group <= 8 and 8 or 16
  local name = is_packed and ("%s_%d"):format(last, rows) or last
  return "paged_decode", DECODE:format(size, CPP[kv], rows, SHORT[q], size, name, CPP[q],
    size, CPP[kv], rows) .. mend
end

--- A hook is compiled into the attention kernel of a shape.
function M.hook(self, target)
  local plan, lines = self.plan, fixed_lines(self.plan)
  for _, text in ipairs(shared.input_lines(plan, "row.seq",
    "(row.seq * row.kv_heads + kv_head)")) do
    lines[#lines + 1] = text
  end
  local body = shared.body(self, function(s)
    local bind = { head = { text = "head", level = 1 },
                   token = { text = "token", level = 1 } }
    s.block_level = 1
    local texts = {}
    for i, root in ipairs(plan.roots) do texts[i] = s:at(1, s.value, root.node, bind) end
    s.top = 1
    for i, root in ipairs(plan.roots) do
      s:line((root.name == "add" and "score += (%s) * kvl::LOG2E;"
        or "if (!(%s)) score = -INFINITY;"):format(texts[i]))
    end
    s.top = 2
  end)
  local header, text = attention_kernel(plan, target)
  return ('#include "cuda/attention/%s.cuh"\n'):format(header)
    .. '#include "cuda/expression.cuh"\n\n'
    .. ("enum { TOKENS = %d };\n"):format(plan.sizes.token) .. shared.struct(plan) .. "\n"
    .. HOOK:format(tostring(plan.roots[1] ~= nil), tostring(plan.keeps or false),
      indented(lines, "    ") .. indented(body, "    ")) .. text
end

local EMIT = [[
extern "C" __global__ void __launch_bounds__(THREADS)
    kvl_code(const __grid_constant__ arguments args) {
  const arguments *a = &args;
  let_next_start();
  wait_for_previous();
  const int kv_heads = (int)a->kv_heads;
  const int64_t row = blockIdx.y, seq = row / kv_heads, stride = a->width * TOKENS;
  const int kv_head = (int)(row %% kv_heads);
  const int length = ((const int32_t *)a->lens)[seq];
  const int blocks = (length + TOKENS - 1) / TOKENS, query_index = length - 1;
  const int seen_from = kvl__window_begin((int)a->window, query_index);
  const float *row_lse = (const float *)a->lse + row * GROUP;
  const float *scores = (const float *)a->scores + row * GROUP * stride;
  float *out = (float *)a->out + row * a->width * CELLS;
  const int lane = threadIdx.x %% TEAM, team = threadIdx.x / TEAM;
%s  const int64_t entry = (int64_t)blockIdx.x * TEAMS + team;
  const int32_t *selection = (const int32_t *)a->selection;
  if (selection)
    selection += (seq * a->selection_heads + kv_head %% a->selection_heads) * a->entries;
  const int found = entry >= a->entries ? -1 : selection ? selection[entry] : (int)entry;
  const bool known = found >= 0 && found < blocks && found < a->width;
  const int block = known ? found : 0; /* lanes of a warp must not part */
  const int tokens = known ? min_i32(TOKENS, length - block * TOKENS) : 0;
%s  const bool is_empty = !known && !selection && entry < a->width;
  for (int cell = lane; is_empty && cell < CELLS; cell += TEAM)
    out[entry * CELLS + cell] = %s;
}
]]

--- A team takes a block, and its lanes take the tokens.
function M.emit(self)
  local plan, root = self.plan, self.plan.roots[1]
  local nothing = shared.nothing(root)
  local fixed, block = shared.body(self, function(s)
    if root.by_token then
      s:over({ "token" }, function(bind)
        local text, at = s:value(root.node, bind), bind.token.text
        s:line(("if (known && %s < TOKENS) out[block * TOKENS + %s] = %s < tokens ? %s "
          .. ": %s;"):format(at, at, at, text, nothing))
      end)
    else
      local text = s:value(root.node, {})
      s:line(("if (known && lane == 0) out[block] = %s;"):format(text))
    end
  end)
  local lines = fixed_lines(plan)
  for _, text in ipairs(shared.input_lines(plan, "seq", "row")) do
    lines[#lines + 1] = text
  end
  return ("enum { GROUP = %d, CELLS = %s };\n"):format(plan.sizes.head,
      shared.cells(root))
    .. EMIT:format(indented(lines, "  ") .. indented(fixed, "  "), indented(block, "  "),
      nothing)
end

return M
