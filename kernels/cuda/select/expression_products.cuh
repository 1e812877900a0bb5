/* For kernels of expressions whose sums over dim are matrix products
 * (lua/kvlab/kernel/print/cuda_products.lua): the rows of blocks on their way through
 * shared memory, and their products with the group's queries (score_mma.cuh).
 *
 * A turn is the work that a warp scores at once: 32 blocks with one row each, or as many
 * blocks as have 32 tokens together, or one larger block. Its items lie in slots, SLOTS for
 * each block, and a tile is 16 slots. Each warp is its own pipeline of asynchronous copies. */
#ifndef KVL_CUDA_EXPRESSION_PRODUCTS_CUH
#define KVL_CUDA_EXPRESSION_PRODUCTS_CUH

#include "cuda/select/score_mma.cuh"

#include "cuda/expression.cuh"

/* T: of the rows; ITEMS: of a block, which has ROWS rows of DIM numbers for each of them. */
template <class T, int D, int ROWS, int DIM, int ITEMS, int SLOTS> struct product_turns {
  using ring = kvl::score_ring<T, D, ROWS>;
  static constexpr int BLOCKS = SLOTS < 32 ? 32 / SLOTS : 1; /* of a turn */
  static constexpr int TILES = BLOCKS * SLOTS / 16, STEP = BLOCKS * ring::WARPS;
  static constexpr int STAGES = ring::STAGES, PIECES = ring::PIECES;

  const T *row[ROWS];   /* the first item's in physical block 0 */
  uint32_t stride;      /* numbers from a block to the next */
  const int32_t *table; /* of the sequence */
  int first, end;       /* the thread block's blocks */
  int length, rows;     /* tokens of the sequence; blocks that memory has */
  char *memory;         /* this warp's tiles */
  uint32_t *known;      /* bit i: slot i of a stage is an item */
  int warp, stage, next;

  DEVICE_MEMBER int block_of(int tile, int slot) const {
    const int turn = tile / TILES;
    return first + turn * STEP + warp * BLOCKS + (tile % TILES * 16 + slot) / SLOTS;
  }
  DEVICE_MEMBER static int item_of(int tile, int slot) {
    return (tile % TILES * 16 + slot) % SLOTS;
  }
  DEVICE_MEMBER int look(int tile) const {
    const int block = block_of(tile, threadIdx.x % 16);
    return block < end ? table[block] : -1;
  }
  DEVICE_MEMBER void fetch(int into, int tile, int physical) {
    const int slot = threadIdx.x % 16, lane = threadIdx.x % 32;
    const int left = ITEMS == 1 ? 1 : length - block_of(tile, slot) * ITEMS;
    const int item = item_of(tile, slot);
    const bool valid = physical >= 0 && physical < rows && item < ITEMS && item < left;
    const uint32_t mask = __ballot_sync(0xFFFFFFFFu, valid);
    if (lane == 0) known[into] = mask & 0xFFFFu;
    if (physical < 0 || physical >= rows) physical = 0;
    const uint32_t to = kvl::shared_address(memory + into * ring::TILE_BYTES);
#pragma unroll
    for (int i = 0; i < 16 * PIECES / 32; i++) {
      const int at = (i * 32 + lane) / PIECES, piece = (i * 32 + lane) % PIECES;
      constexpr int N = 16 / (int)sizeof(T);
      const bool inside = piece * N < DIM, has = (mask >> at & 1) && inside;
      const uint32_t block = SLOTS >= 16 ? physical : __shfl_sync(0xFFFFFFFFu, physical, at);
      const uint64_t from = (uint64_t)block * stride + (inside ? piece * N : 0) +
                            (ITEMS > 1 && has ? item_of(tile, at) * DIM : 0);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        kvl::copy_async(
            to + r * 16 * ring::ROW_BYTES + kvl::score_piece<PIECES>(at, piece) * 16,
            row[r] + from, has); /* otherwise zeros */
    }
  }
  DEVICE_MEMBER void begin() {
    int ahead[STAGES - 1];
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) ahead[s] = look(s);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
      fetch(s, s, ahead[s]);
      kvl::copy_commit();
    }
    stage = 0;
    next = look(STAGES - 1);
  }
  /* Waits for a tile, begins to copy the one STAGES - 1 later, and returns the tile's
   * memory and which of its slots are items. */
  DEVICE_MEMBER const uint4 *take(int tile, uint32_t *items) {
    kvl::copy_wait<STAGES - 2>();
    __syncwarp(); /* all copies have arrived, and the last tile was read */
    fetch(stage == 0 ? STAGES - 1 : stage - 1, tile + STAGES - 1, next);
    kvl::copy_commit();
    next = look(tile + STAGES);
    *items = known[stage];
    const uint4 *at = (const uint4 *)(memory + stage * ring::TILE_BYTES);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    return at;
  }
};

/* Number d of row r of an item in a tile. */
template <class T, int D>
DEVICE float tile_number(const uint4 *tile, int r, int item, int d) {
  constexpr int N = 16 / (int)sizeof(T), PIECES = D / N;
  const void *p = tile + kvl::score_piece<PIECES>(r * 16 + item, d / N);
  if constexpr (sizeof(T) == 4) return ((const float *)p)[d % N];
  else if constexpr (sizeof(T) == 1) return from_f8e4m3(((const uint8_t *)p)[d % N]);
  else if constexpr (kvl::same<T, __half>) return from_f16(((const uint16_t *)p)[d % N]);
  else return from_bf16(((const uint16_t *)p)[d % N]);
}

/* Sums of a tile's items and all heads, to products[head * STRIDE + item]. q has the rows of
 * heads [terms][rows in USED][PADDED]. If a sum is not finite, it is computed again term by
 * term, exact(head, item): when a number is split into parts, a factor that is not finite
 * gives a wrong product (0 * inf), and any such factor makes the sum not finite. */
template <class T, int D, int ROWS, int USED, int DIM, int HEADS, int STRIDE, class EXACT>
DEVICE void tile_sums(const uint4 *tile, const uint4 *q, const float *unscale, int terms,
                      float *products, EXACT exact) {
  constexpr int PADDED = (HEADS + 7) / 8 * 8, GROUPS = PADDED % 16 == 0 ? 2 : 1;
  const int item = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int h0 = 0; h0 < PADDED; h0 += 8 * GROUPS) {
    float c[GROUPS][4];
    kvl::score_products<T, D, ROWS, USED, DIM>(c, tile, q, h0 + item, PADDED, terms);
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++) {
      float &x = c[i / 4][i % 4];
      x *= unscale[h0 + i / 4 * 8 + column + i % 2];
      is_finite = is_finite && fabsf(x) < INFINITY;
    }
    if (__any_sync(0xFFFFFFFFu, !is_finite))
#pragma unroll 1
      for (int i = 0; i < 4 * GROUPS; i++) {
        const int head = h0 + i / 4 * 8 + column + i % 2;
        float x = 0;
#pragma unroll
        for (int k = 0; k < 4 * GROUPS; k++) x = k == i ? c[k / 4][k % 4] : x;
        if (head < HEADS && !(fabsf(x) < INFINITY)) x = exact(head, item + i % 4 / 2 * 8);
#pragma unroll
        for (int k = 0; k < 4 * GROUPS; k++) c[k / 4][k % 4] = k == i ? x : c[k / 4][k % 4];
      }
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++) {
      const int head = h0 + i / 4 * 8 + column + i % 2, at = item + i % 4 / 2 * 8;
      if (head < HEADS) products[head * STRIDE + at] = c[i / 4][i % 4];
    }
  }
}

#endif
