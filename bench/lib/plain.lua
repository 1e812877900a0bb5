--- R(n): how fast can n bytes be read at all? The fastest of several plain reads, which
-- differ in how many threads read and how much a thread has under way. The L2 is cold, as
-- it is for the cases. An empty launch takes 3 us on a GPU, and a read of few bytes is
-- bound by that and by the latency of memory; so R grows with n.
--
-- With `written`, the same kernel writes this many of the bytes: writes of up to the size
-- of the L2 can end after the kernel does, so a time of reads alone would be no limit.
local ffi = require "ffi"
local kv = require "kvlab"
local wrap = require("kvlab.tensor.tensor").wrap

local M = {}

local MIB = 1024 * 1024
local PACK = 16               -- bytes of a load
local SUMS = 2 ^ 20           -- at least as many as warps in a grid, or threads of a CPU
local TRIES, FINALISTS = 7, 3 -- calls of a grid in the first round; grids of the second

-- Thread blocks on an SM, threads of a block, loads that a thread has under way. 16 x 512
-- reads 2 GiB fastest on an H200; few bytes want few blocks.
local GRIDS = {
  { 1, 256, 1 }, { 1, 512, 1 }, { 1, 512, 2 }, { 2, 256, 2 }, { 4, 128, 2 },
  { 1, 1024, 1 }, { 2, 512, 1 }, { 1, 1024, 4 }, { 2, 512, 8 },
  { 2, 1024, 4 }, { 2, 1024, 8 }, { 4, 256, 8 }, { 4, 512, 4 }, { 4, 512, 8 },
  { 8, 256, 4 }, { 8, 512, 4 }, { 8, 256, 8 }, { 16, 512, 1 }, { 16, 512, 2 },
  { 16, 512, 4 }, { 16, 256, 4 }, { 32, 512, 2 }, { 32, 256, 4 },
  { 1e6, 256, 1 }, { 1e6, 256, 2 }, { 1e6, 512, 4 },
}

-- Tiles are interleaved: thread blocks that read neighbouring tiles at the same time are
-- faster than blocks with a stretch each. Every warp leaves the xor of what it has read.
-- If about twice as much is read as written, reads and writes alternate: each written
-- tile is made from two neighbouring tiles. Otherwise the writes come last.
local CUDA = [[
__device__ uint4 xor_of(uint4 a, uint4 b) {
  return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}
template <int LOADS>
__device__ unsigned read(const uint4 *x, int64_t packs, uint4 *to, int64_t packs_to) {
  const int64_t tile = (int64_t)blockDim.x * LOADS;
  const uint4 none = make_uint4(0, 0, 0, 0);
  uint4 sum = none;
  constexpr int PAIRS = LOADS > 1 ? LOADS / 2 : 1;
  const int64_t pairs = 2 * packs_to <= packs && packs <= 2.1 * packs_to ? packs_to : 0;
  const int64_t part = (int64_t)blockDim.x * PAIRS;
  for (int64_t t = blockIdx.x * part; t < pairs; t += gridDim.x * part) {
    const int64_t here = part < pairs - t ? part : pairs - t;
    uint4 a[PAIRS], b[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int64_t p = t + i * blockDim.x + threadIdx.x;
      a[i] = p < pairs ? __ldcs(x + t + p) : none;
      b[i] = p < pairs ? __ldcs(x + t + here + p) : none;
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int64_t p = t + i * blockDim.x + threadIdx.x;
      a[i] = xor_of(a[i], b[i]);
      if (p < pairs) to[p] = a[i];
      sum = xor_of(sum, a[i]);
    }
  }
  for (int64_t t = 2 * pairs + blockIdx.x * tile; t < packs; t += gridDim.x * tile) {
    uint4 at[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int64_t p = t + i * blockDim.x + threadIdx.x;
      at[i] = p < packs ? __ldcs(x + p) : none;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) sum = xor_of(sum, at[i]);
  }
  const unsigned all = sum.x ^ sum.y ^ sum.z ^ sum.w;
  if (pairs > 0) return all;
  for (int64_t p = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; p < packs_to;
       p += gridDim.x * (int64_t)blockDim.x)
    to[p] = make_uint4(all, all, all, all);
  return all;
}

void plain(const int32_t *in, int32_t *to, int32_t *sums, int blocks, int threads,
           int loads, int64_t words, int64_t words_to, int64_t warps) {
  const uint4 *x = (const uint4 *)in;
  uint4 *y = (uint4 *)to;
  const int64_t packs = words / 4, packs_to = words_to / 4;
  unsigned sum = loads == 1   ? read<1>(x, packs, y, packs_to)
                 : loads == 2 ? read<2>(x, packs, y, packs_to)
                 : loads == 4 ? read<4>(x, packs, y, packs_to)
                              : read<8>(x, packs, y, packs_to);
  for (int i = 16; i > 0; i /= 2) sum ^= __shfl_xor_sync(0xffffffffu, sum, i);
  const int64_t warp = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) sums[warp] = (int)sum;
}
]]

-- One thread reads, or all of them with a stretch each; waking threads takes longer than
-- reading a few kilobytes. The written bytes are copied from bytes that were just read,
-- because memcpy knows how to write lines that were not read before; or (loads 2) they
-- are written where they were read (blocks is 1, which the compiler does not know).
local C = [[
#include <omp.h>
#include <string.h>
enum { CHUNK = 16384 };

void plain(const int32_t *in, int32_t *to, int32_t *sums, int blocks, int threads,
           int loads, int64_t words, int64_t words_to, int64_t warps) {
  const int64_t most = words > words_to ? words : words_to;
#pragma omp parallel if (threads > 1)
  {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    const int64_t end = most * (i + 1) / n;
    int32_t sum = 0;
    for (int64_t w = most * i / n; w < end; w += CHUNK) {
      const int64_t stop = w + CHUNK < end ? w + CHUNK : end;
      const int64_t read = stop < words ? stop : words;
#pragma omp simd reduction(^ : sum)
      for (int64_t j = w; j < read; j++) sum ^= in[j];
      const int64_t first = w * words_to / most, count = stop * words_to / most - first;
      if (loads == 2)
        for (int64_t j = w; j < w + count; j++) to[j] = in[j] ^ (blocks - 1);
      else if (w + count <= words) memcpy(to + first, in + w, (size_t)count * 4);
      else memset(to + first, 1, (size_t)count * 4);
    }
    if (i < warps) sums[i] = sum;
  }
}
]]

local plain -- made once

--- The kernel; a bundle carries it compiled.
function M.kernel()
  plain = plain or kv.kernel.source { name = "plain", cuda = CUDA, c = C,
    arguments = { "in i32 [words]", "to i32 [words_to] written",
      "sums i32 [warps] written", "blocks i32", "threads i32", "loads i32" },
    grid = function(n) return n.blocks end, block = function(n) return n.threads end }
  return plain
end

--- The ways to read that are tried: { name, run }. Without a compiler only the sum op.
local function ways(b, x, to, sums)
  local n, n_to = x.words:size(0), to:size(0)
  local list = { { name = "sum", run = function() x.floats:sum(0, x.total) end } }
  local ok, why = pcall(function() M.kernel():compile(b.device) end)
  if n_to > 0 then
    if not ok then error("R with writes: " .. tostring(why), 0) end
    list = {}
    local least = math.min(n, n_to)
    if least > 0.9 * math.max(n, n_to) then
      local from, into = x.words:narrow(0, least), to:narrow(0, least)
      list[1] = { name = "copy", run = function() into:copy_(from) end }
    elseif n >= 2 * n_to then
      local one, two = x.words:narrow(0, n_to), x.words:narrow(n_to, n_to)
      if n <= 2.1 * n_to then
        list[1] = { name = "sum of two", run = function() one:add(two, to) end }
      end
    end
  end
  if not ok then return list end
  if b.kind == "cpu" then
    for threads, name in ipairs { "one thread", "all threads" } do
      list[#list + 1] = { name = name, sums = true,
        run = function() plain(x.words, to, sums, 1, threads, 1) end }
      if n_to > 0 and n >= n_to then
        local here = x.words:narrow(0, n_to)
        list[#list + 1] = { name = name .. ", in place", sums = true,
          run = function() plain(x.words, here, sums, 1, threads, 2) end }
      end
    end
    return list
  end
  local sms = tonumber(b.device:description():match "(%d+) SMs") or 132
  for _, grid in ipairs(GRIDS) do
    local threads, loads = grid[2], grid[3]
    local blocks = math.max(1, math.min(grid[1] * sms,
      math.ceil(math.max(n, n_to) * 4 / (PACK * threads * loads)), SUMS * 32 / threads))
    list[#list + 1] = { sums = true,
      name = ("%d x %d threads, %d loads each"):format(blocks, threads, loads),
      run = function() plain(x.words, to, sums, blocks, threads, loads) end }
  end
  return list
end

local function xor_of(t)
  local sum, host = 0, t:to "cpu"
  local words = ffi.cast("int32_t *", host:data())
  for i = 0, tonumber(host.count) - 1 do sum = bit.bxor(sum, words[i]) end
  return sum
end

--- Checks that every way has read everything: their sums agree and, for few bytes, equal
-- the host's sum.
local function check(list, x, sums)
  local want = x.words:bytes() <= 4 * MIB and xor_of(x.words) or nil
  for _, way in ipairs(list) do
    if way.sums then
      sums:fill_(0)
      way.run()
      local got = xor_of(sums)
      want = want or got
      assert(got == want, ("plain read by %s: the sum is wrong"):format(way.name))
    end
  end
end

local function size_words(bytes)
  if bytes < MIB then return ("%.0f KiB"):format(bytes / 1024) end
  return ("%.0f MiB"):format(bytes / MIB)
end

--- The row of R for so many bytes. More than an eighth of the device's memory is not
-- read: for longer reads the rate stays the same.
---@param bytes integer    read and written
---@param written integer
function M.row(b, bytes, written)
  local most = math.floor(b.device:stats().bytes_total / 8)
  local scale = math.min(1, most / math.max(bytes, 1))
  local function words(n) return math.ceil(n * scale / PACK) * PACK / 4 end
  local dims = { words(bytes - written) }
  local x = { words = kv.randint(b.device, "i32", dims,
    { low = -2 ^ 31, high = 2 ^ 31 - 1, seed = 1 }) }
  x.floats = wrap(b.device, "f32", dims, x.words.ptr)
  x.total = kv.tensor(b.device, "f32", {})
  local to = kv.tensor(b.device, "i32", { words(written) })
  local sums = kv.zeros(b.device, "i32", { SUMS })
  local list = ways(b, x, to, sums)
  check(list, x, sums)
  b:settle(function()
    b:flush()
    list[1].run()
  end)
  for _, way in ipairs(list) do way.us = b:sample(way.run, b.quick and 1 or TRIES) end
  table.sort(list, function(a, c) return a.us < c.us end)
  local best
  for i = 1, math.min(FINALISTS, #list) do
    local way = list[i]
    way.us = b:time(way.run, 30)
    if not best or way.us < best.us then best = way end
  end
  local took = (x.words:bytes() + to:bytes())
  local name = written > 0 and ("plain read of %s and write of %s"):format(
    size_words(x.words:bytes()), size_words(to:bytes()))
    or ("plain read of %s"):format(size_words(took))
  return { name = name, us = best.us, bytes = took, note = best.name }
end

--- The sizes of `kvlab bench R`.
function M.ladder(b)
  local list = {}
  for _, mib in ipairs { 1 / 16, 1, 8, 32, 128, 512, 2048 } do
    list[#list + 1] = mib * MIB / (b.quick and 256 or 1)
  end
  return list
end

return M
