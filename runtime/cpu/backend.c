/* The CPU as a device: its instruction sets, its memory and its table of functions. There
 * are kernels for three instruction sets, and the device uses the fastest set that the
 * processor has. cpu/queue.c runs them. The build defines KVL_HAS_ISA_<ISA> for those it has
 * compiled. */
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cblas.h>
#include <omp.h>

#include "abi.h"
#include "cpu/backend.h"
#include "cpu/queue.h"

/* ---- kernels by instruction set -------------------------------------------------------- */

typedef size_t workspace_of(const void *args);

#define KVL_TABLE(isa)                                                               \
  KVL_OPS(KVL_PROTO_##isa)                                                           \
  KVL_WITH_WORKSPACE(KVL_SIZE_##isa)                                                 \
  static kvl_kernel *const kernels_##isa[KVL_OP_COUNT] = {KVL_OPS(KVL_ENTRY_##isa)}; \
  static workspace_of *const workspaces_##isa[KVL_OP_COUNT] = {                      \
      KVL_WITH_WORKSPACE(KVL_SIZED_##isa)};

#define KVL_WITH_WORKSPACE(X) \
  X(paged_attention)          \
  X(matmul)                   \
  X(linear)                   \
  X(head_matmul)              \
  X(experts)
#define KVL_PROTO_plain(op) kvl_kernel kvl_cpu_##op##_plain;
#define KVL_PROTO_avx2(op) kvl_kernel kvl_cpu_##op##_avx2;
#define KVL_PROTO_avx512(op) kvl_kernel kvl_cpu_##op##_avx512;
#define KVL_ENTRY_plain(op) [KVL_OP_##op] = kvl_cpu_##op##_plain,
#define KVL_ENTRY_avx2(op) [KVL_OP_##op] = kvl_cpu_##op##_avx2,
#define KVL_ENTRY_avx512(op) [KVL_OP_##op] = kvl_cpu_##op##_avx512,
#define KVL_SIZE_plain(op) workspace_of kvl_cpu_##op##_workspace_plain;
#define KVL_SIZE_avx2(op) workspace_of kvl_cpu_##op##_workspace_avx2;
#define KVL_SIZE_avx512(op) workspace_of kvl_cpu_##op##_workspace_avx512;
#define KVL_SIZED_plain(op) [KVL_OP_##op] = kvl_cpu_##op##_workspace_plain,
#define KVL_SIZED_avx2(op) [KVL_OP_##op] = kvl_cpu_##op##_workspace_avx2,
#define KVL_SIZED_avx512(op) [KVL_OP_##op] = kvl_cpu_##op##_workspace_avx512,

#ifdef KVL_HAS_ISA_PLAIN
KVL_TABLE(plain)
#endif
#ifdef KVL_HAS_ISA_AVX2
KVL_TABLE(avx2)
#endif
#ifdef KVL_HAS_ISA_AVX512
KVL_TABLE(avx512)
#endif

struct isa {
  const char *name, *words;
  kvl_kernel *const *kernels;
  workspace_of *const *workspaces; /* NULL for an op that needs none */
};
#define KVL_ISA_ROW(isa, words) \
  { #isa, words, kernels_##isa, workspaces_##isa }
/* From the slowest to the fastest. */
static const struct isa isas[] = {
#ifdef KVL_HAS_ISA_PLAIN
    KVL_ISA_ROW(plain, "portable C"),
#endif
#ifdef KVL_HAS_ISA_AVX2
    KVL_ISA_ROW(avx2, "AVX2"),
#endif
#ifdef KVL_HAS_ISA_AVX512
    KVL_ISA_ROW(avx512, "AVX-512"),
#endif
};
enum { ISAS = sizeof isas / sizeof isas[0] };

static int isa_supported(const struct isa *isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
  if (!strcmp(isa->name, "avx2")) return avx2;
  if (!strcmp(isa->name, "avx512"))
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return !strcmp(isa->name, "plain");
}

/* Returns the instruction set in use: the last one that was passed as `choose`, else the
 * fastest that the processor has. It is NULL if the processor has none of the sets that were
 * compiled; then the device does not open. */
static const struct isa *isa_in_use(const struct isa *choose) {
  static const struct isa *current;
  if (choose) current = choose;
  for (int i = ISAS - 1; !current && i >= 0; i--)
    if (isa_supported(&isas[i])) current = &isas[i];
  return current;
}

const char *kvl_cpu_isa(void) {
  const struct isa *isa = isa_in_use(NULL);
  return isa ? isa->name : "none";
}

int kvl_cpu_use_isa(const char *name) {
  if (!name) return kvl__missing(__func__, "isa");
  char there[64] = "";
  for (int i = 0; i < ISAS; i++) {
    if (!isa_supported(&isas[i])) continue;
    if (!strcmp(isas[i].name, name)) {
      isa_in_use(&isas[i]);
      return KVL_OK;
    }
    size_t used = strlen(there);
    snprintf(there + used, sizeof there - used, "%s%s", used ? ", " : "", isas[i].name);
  }
  int is_known = !strcmp(name, "plain") || !strcmp(name, "avx2") || !strcmp(name, "avx512");
  return kvl__fail(is_known ? KVL_ERR_UNSUPPORTED : KVL_ERR_INVALID,
                   "isa is \"%s\"; this build and this processor have %s", name,
                   there[0] ? there : "none that kvlab knows");
}

/* ---- the table --------------------------------------------------------------------- */

static int count(void) { return 1; }

static int open_cpu(int index, void **ctx, char *words) {
  (void)index;
  if (!isa_in_use(NULL)) {
    snprintf(words, KVL_WORDS_MAX,
             "this build has kernels for %s only, which this processor lacks", isas[0].words);
    return KVL_ERR_UNSUPPORTED;
  }
  *ctx = (void *)&isas; /* no state of its own */
  return KVL_OK;
}

static void close_cpu(void *ctx) { (void)ctx; }

static void describe(void *ctx, char *text, size_t size) {
  (void)ctx;
  char link[64];
  kvl__link_describe(link, sizeof link);
  snprintf(text, size, "%s, %d threads%s", isa_in_use(NULL)->words, omp_get_max_threads(),
           link);
}

static int memory(void *ctx, int64_t *bytes_free, int64_t *bytes_total) {
  (void)ctx;
  int64_t page = sysconf(_SC_PAGESIZE);
  *bytes_free = page * sysconf(_SC_AVPHYS_PAGES);
  *bytes_total = page * sysconf(_SC_PHYS_PAGES);
  return KVL_OK;
}

static const size_t BYTES_HUGE_PAGE = (size_t)2 << 20;

/* Refuses more memory than the machine has: the system would grant it, but kill the process
 * at the first touch of a page that finds no memory. Huge pages are a wish, which the system
 * may refuse. They help because blocks lie anywhere in memory, and the processor keeps the
 * address translations of only a few small pages. */
static int alloc_aligned(size_t bytes, int huge_pages, void **out) {
  size_t align = huge_pages ? BYTES_HUGE_PAGE : 256;
  int64_t bytes_free, bytes_total;
  memory(NULL, &bytes_free, &bytes_total);
  if (bytes > (size_t)bytes_total) return KVL_ERR_NO_MEMORY;
  size_t whole = (bytes + align - 1) & ~(align - 1);
  void *p = aligned_alloc(align, whole);
  if (!p) return KVL_ERR_NO_MEMORY;
  if (huge_pages) madvise(p, whole, MADV_HUGEPAGE);
  *out = p;
  return KVL_OK;
}

static int alloc(void *ctx, size_t bytes, void **out) {
  (void)ctx;
  return alloc_aligned(bytes, bytes >= BYTES_HUGE_PAGE, out);
}

static void free_cpu(void *ctx, void *p) {
  (void)ctx;
  free(p);
}

/* The system takes these pages before it swaps or kills, and leaves them as they are while
 * there is enough memory. Then the next use of them costs no page faults. */
static void unused_cpu(void *ctx, void *p, size_t bytes) {
  (void)ctx;
#ifdef MADV_FREE
  madvise(p, bytes, MADV_FREE);
#else
  (void)p, (void)bytes;
#endif
}

/* All memory is the host's. */
static int host_alloc(void *ctx, size_t bytes, int huge_pages, void **out) {
  return huge_pages ? alloc_aligned(bytes, 1, out) : alloc(ctx, bytes, out);
}

static void host_free(void *ctx, void *p, size_t bytes) {
  (void)bytes;
  free_cpu(ctx, p);
}

static size_t workspace(void *ctx, enum kvl_op op, const void *args) {
  (void)ctx;
  workspace_of *const of = isa_in_use(NULL)->workspaces[op];
  return of ? of(args) : 0;
}

static int launch(void *ctx, void *queue, enum kvl_op op, const void *args, size_t size) {
  (void)ctx;
  return kvl__cpu_submit(queue, isa_in_use(NULL)->kernels[op], args, size);
}

const char *kvl_cpu_blas(void) { return openblas_get_corename(); }

/* Kernels of processors without AVX2. Prescott's are what an unknown processor gets. */
static const char *const OLD_BLAS[] = {
    "Prescott",  "Core2",      "Penryn",      "Dunnington",   "Nehalem",   "Sandybridge",
    "Atom",      "Nano",       "Opteron",     "Opteron_SSE3", "Barcelona", "Bobcat",
    "Bulldozer", "Piledriver", "Steamroller", "Generic",
};
const char *kvl_cpu_blas_better(void) {
  int is_old = 0;
  for (size_t i = 0; i < sizeof OLD_BLAS / sizeof *OLD_BLAS; i++)
    is_old |= !strcasecmp(kvl_cpu_blas(), OLD_BLAS[i]);
  if (!is_old) return NULL;
  if (isa_supported(&(struct isa){.name = "avx512"})) return "SkylakeX";
  return isa_supported(&(struct isa){.name = "avx2"}) ? "Haswell" : NULL;
}

/* "OpenBLAS 0.3.21": what follows is about the processor, not about results. */
static const char *build(void) {
  static char words[64];
  const char *config = openblas_get_config();
  const char *version = strchr(config, ' ');
  size_t length = version ? (size_t)(version - config) + 1 + strcspn(version + 1, " ") : 0;
  snprintf(words, sizeof words, "%.*s", (int)length, config);
  return words;
}

static int target(void *ctx, char *text, size_t size) {
  (void)ctx;
  snprintf(text, size, "%s", isa_in_use(NULL)->name);
  return KVL_OK;
}

static const char *last_error(void) { return kvl__cpu_code_error(); }

const kvl_backend kvl__backend_cpu = {
    .version = KVL_BACKEND_VERSION,
    .name = "cpu",
    .host_memory = 1,
    .count = count,
    .open = open_cpu,
    .close = close_cpu,
    .describe = describe,
    .memory = memory,
    .alloc = alloc,
    .free = free_cpu,
    .unused = unused_cpu,
    .host_alloc = host_alloc,
    .host_free = host_free,
    .queue_open = kvl__cpu_queue_open,
    .queue_close = kvl__cpu_queue_close,
    .queue_sync = kvl__cpu_queue_sync,
    .mark_open = kvl__cpu_mark_open,
    .mark_close = kvl__cpu_mark_close,
    .mark_record = kvl__cpu_mark_record,
    .queue_wait = kvl__cpu_queue_wait,
    .mark_sync = kvl__cpu_mark_sync,
    .mark_done = kvl__cpu_mark_done,
    .mark_elapsed_us = kvl__cpu_mark_elapsed_us,
    .copy = kvl__cpu_copy,
    .workspace = workspace,
    .launch = launch,
    .code_open = kvl__cpu_code_open,
    .code_close = kvl__cpu_code_close,
    .code_hook = kvl__cpu_code_hook,
    .code_launch = kvl__cpu_code_launch,
    .target = target,
    .graph_begin = kvl__cpu_graph_begin,
    .graph_end = kvl__cpu_graph_end,
    .graph_launch = kvl__cpu_graph_launch,
    .graph_close = kvl__cpu_graph_close,
    .build = build,
    .last_error = last_error,
};
