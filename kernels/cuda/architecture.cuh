/* GPUs, and how much shared memory the tiles of kernels take on them.
 *
 * Tiles in shared memory have two sizes. Large tiles use all that Hopper gives a thread
 * block. Small tiles fit into what every GPU from sm_80 on gives a thread block; a GPU that
 * has more, such as an A100, runs two such thread blocks on an SM. The shapes of kernels
 * take the size as their last parameter. Code for an architecture has one of the two sizes,
 * so the host chooses by the code that runs, not by the GPU: code for sm_80 also runs on
 * sm_86 and sm_89.
 *
 * Source    CUDA C++ Programming Guide, "Compute Capabilities", technical specifications */
#ifndef KVL_CUDA_ARCHITECTURE_CUH
#define KVL_CUDA_ARCHITECTURE_CUH

namespace kvl {

/* block_kib: the shared memory that a thread block may ask for; sm_kib: that of an SM; each
 * thread block takes one KiB more than it asks for. An SM has 65536 registers. */
struct architecture {
  int number, block_kib, sm_kib, sm_threads;
};
constexpr architecture ARCHITECTURES[] = {
    {80, 163, 164, 2048},  /* A100 */
    {86, 99, 100, 1536},   /* RTX 3090, A40, A10 */
    {89, 99, 100, 1536},   /* RTX 4090, L40S, L4 */
    {90, 227, 228, 2048},  /* H100, H200 */
    {100, 227, 228, 2048}, /* B200 */
    {120, 99, 100, 1536},  /* RTX 5090, RTX PRO 6000 */
};

/* A kernel that takes up to 48 KiB of shared memory need not ask for it. This much may be
 * dynamic, besides at most 24 KiB of static shared memory. */
constexpr int SHARED_UNASKED = 24 << 10;

enum tile_size { SMALL_TILES, LARGE_TILES };
constexpr tile_size tiles_of(int architecture_number) {
  return architecture_number >= 90 && architecture_number < 120 ? LARGE_TILES : SMALL_TILES;
}

/* The bytes of shared memory that a thread block may ask for; of an architecture that is not
 * listed, `otherwise`. */
constexpr int block_bytes_of(int number, int otherwise) {
  for (const architecture &a : ARCHITECTURES)
    if (a.number == number) return a.block_kib << 10;
  return otherwise;
}

/* Does a thread block with tiles of this size fit on every architecture whose code has them?
 * bytes: of shared memory, all of it; registers: of a thread. */
constexpr bool fits(tile_size tiles, int bytes, int threads, int registers = 0) {
  for (const architecture &a : ARCHITECTURES)
    if (tiles_of(a.number) == tiles &&
        (bytes > a.block_kib << 10 || threads > 1024 || threads > a.sm_threads ||
         threads * registers > 65536))
      return false;
  return true;
}

/* The size in the code that is being compiled. The host's code names the size of each shape. */
#ifdef __CUDA_ARCH__
constexpr tile_size TILES_HERE = tiles_of(__CUDA_ARCH__ / 10);
#else
constexpr tile_size TILES_HERE = LARGE_TILES;
#endif

}  // namespace kvl

#endif
