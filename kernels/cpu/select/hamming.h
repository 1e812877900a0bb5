/* Distances of hashes: the number of bits in which the hash of a block differs from that of a
 * query. If there is a hash for every token, those of a block lie together, and processors
 * that can count bits in vectors compare a vector of them at a time. If there is one hash per
 * block, they are scattered and are prefetched. */
#ifndef KVL_CPU_HAMMING_H
#define KVL_CPU_HAMMING_H

#include "args/select.h"
#include "cpu/split.h"
#include "cpu/vec.h"

/* HAMMING_NONE is the distance of a block that does not exist. It comes after all others,
 * which are at most KVL_HASH_BITS_MAX. HAMMING_SOON: how many blocks ahead hashes are
 * prefetched. */
enum { HAMMING_NONE = KVL_HASH_BITS_MAX + 1, HAMMING_SOON = 16 };

/* The blocks of a sequence for one query hash. */
struct hamming {
  const struct kvl_hash_view *hashes;
  const uint64_t *q;
  const int32_t *table;
  int64_t len; /* of the sequence, in tokens */
  int head, block_size;
};

static inline KVL_HOT int hamming_one(const uint64_t *hash, const uint64_t *q, int words) {
  int sum = 0;
  for (int w = 0; w < words; w++) sum += __builtin_popcountll(hash[w] ^ q[w]);
  return sum;
}

#if defined(KVL_ISA_AVX512)
/* The least distance of n > 0 hashes in a row. A vector holds several hashes of 1, 2 or 4
 * words. */
__attribute__((target("avx512vpopcntdq"))) static int hamming_least_vector(
    const uint64_t *hash, int64_t n, const uint64_t *q, int words) {
  int least = HAMMING_NONE;
  if (words == 1 || words == 2 || words == 4) {
    uint64_t pattern[8];
    for (int i = 0; i < 8; i++) pattern[i] = q[i % words];
    const __m512i query = _mm512_loadu_si512(pattern), none = _mm512_set1_epi64(HAMMING_NONE);
    __m512i best = none;
    for (int64_t at = 0; at < n * words; at += 8) {
      int64_t left = n * words - at;
      __mmask8 m = left < 8 ? (__mmask8)((1u << left) - 1) : 0xFF;
      __m512i x = _mm512_xor_si512(_mm512_maskz_loadu_epi64(m, hash + at), query);
      x = _mm512_popcnt_epi64(x);
      if (words > 1) x = _mm512_add_epi64(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
      if (words > 2) x = _mm512_add_epi64(x, _mm512_permutex_epi64(x, 0x4E));
      best = _mm512_mask_min_epu64(best, m, best, x);
    }
    return (int)_mm512_reduce_min_epu64(best);
  }
  for (int64_t t = 0; t < n; t++, hash += words) {
    __m512i sum = _mm512_setzero_si512();
    for (int w = 0; w < words; w += 8) {
      __mmask8 m = words - w < 8 ? (__mmask8)((1u << (words - w)) - 1) : 0xFF;
      __m512i x = _mm512_xor_si512(_mm512_maskz_loadu_epi64(m, hash + w),
                                   _mm512_maskz_loadu_epi64(m, q + w));
      sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(x));
    }
    int distance = (int)_mm512_reduce_add_epi64(sum);
    least = distance < least ? distance : least;
  }
  return least;
}
static inline int hamming_has_vectors(void) {
  return __builtin_cpu_supports("avx512vpopcntdq");
}
#else
static inline int hamming_has_vectors(void) { return 0; }
#endif

static inline KVL_HOT int hamming_least(const uint64_t *hash, int64_t n, const uint64_t *q,
                                        int words, int has_vectors) {
#if defined(KVL_ISA_AVX512)
  if (has_vectors && n > 1) return hamming_least_vector(hash, n, q, words);
#else
  (void)has_vectors;
#endif
  int least = HAMMING_NONE;
  for (int64_t t = 0; t < n; t++, hash += words) {
    int distance = hamming_one(hash, q, words);
    least = distance < least ? distance : least;
  }
  return least;
}

/* The hashes of a logical block; NULL if its entry in the table is out of range. */
static inline KVL_HOT const uint64_t *hamming_block(const struct hamming *h,
                                                    int64_t logical) {
  const struct kvl_hash_view *v = h->hashes;
  int64_t block = h->table[logical];
  if (block < 0 || block >= v->blocks) return NULL;
  return v->hashes + (block * v->kv_heads + h->head) * v->tokens * v->words;
}

/* Sets distance[i] for the logical blocks begin + i before `end`. With is_least, a distance
 * that is there already stays if it is less. */
static inline void hamming_blocks(const struct hamming *h, int64_t begin, int64_t end,
                                  int is_least, uint16_t *distance) {
  const int words = h->hashes->words, has_vectors = hamming_has_vectors();
  const int64_t bytes = (int64_t)h->hashes->tokens * words * 8;
  for (int64_t b = begin; b < end; b++) {
    if (b + HAMMING_SOON < end) {
      const char *soon = (const char *)hamming_block(h, b + HAMMING_SOON);
      for (int64_t at = 0; soon && at < bytes; at += 64) __builtin_prefetch(soon + at);
    }
    const uint64_t *hash = hamming_block(h, b);
    int d = HAMMING_NONE;
    if (hash && !h->hashes->is_token) d = hamming_one(hash, h->q, words);
    else if (hash)
      d = hamming_least(hash, i64_min(h->len - b * h->block_size, h->block_size), h->q, words,
                        has_vectors);
    if (!is_least || d < distance[b - begin]) distance[b - begin] = (uint16_t)d;
  }
}

/* Sets distance[i] to the least over `heads` KV heads from h.head on, whose query hashes lie
 * in a row. */
static inline void hamming_heads(struct hamming h, int heads, int64_t begin, int64_t end,
                                 uint16_t *distance) {
  for (int i = 0; i < heads; i++, h.head++, h.q += h.hashes->words)
    hamming_blocks(&h, begin, end, i > 0, distance);
}

#endif
