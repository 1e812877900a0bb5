/* Copies of tokens' keys and values, in units of up to 16 bytes of a row. */
#ifndef KVL_CUDA_TOKEN_CUH
#define KVL_CUDA_TOKEN_CUH

#include "args/evict.h"
#include "cuda/elementwise.cuh"

namespace kvl {

/* A token has a row in each strip: units of numbers, and behind them units of scales. */
struct token_units {
  divisor each, row; /* units of a token; of a row */
  int32_t numbers;   /* of these, how many have numbers */
};
template <class U> token_units units_of(const kvl_pages &p) {
  token_units l = {};
  l.numbers = p.key.bytes_row / (int)sizeof(U);
  const int row = l.numbers + 2 * p.key.groups / (int)sizeof(U);
  l.row = divisor(row), l.each = divisor(row * kvl__strips(&p));
  return l;
}

template <class U> struct token_unit {
  const U *from;
  U *to;
};
/* Unit i of a token; NULL if a place is out of range. */
template <class U>
__device__ __forceinline__ token_unit<U> find_unit(const kvl_pages &src, int64_t from,
                                                   const kvl_pages &dst, int64_t to,
                                                   const token_units &l, uint32_t i) {
  const int size = src.block_size;
  if (from < 0 || from >= src.blocks * size || to < 0 || to >= dst.blocks * size) return {};
  const uint32_t strip = l.row.quotient(i), u = i - strip * l.row.by;
  const bool is_value = strip >= (uint32_t)src.kv_heads;
  const kvl_strips &of = is_value ? src.value : src.key;
  const int head = (int)strip - (is_value ? src.kv_heads : 0);
  const bool is_number = u < (uint32_t)l.numbers;
  const int64_t row_bytes = is_number ? of.bytes_row : 2 * of.groups;
  const int64_t at = is_number ? (int64_t)u * sizeof(U)
                               : of.scales + (int64_t)(u - l.numbers) * sizeof(U);
  const char *x = (const char *)src.memory + kvl__strip_at(&src, &of, from / size, head);
  char *y = (char *)dst.memory + kvl__strip_at(&dst, &of, to / size, head);
  return {(const U *)(x + from % size * row_bytes + at),
          (U *)(y + to % size * row_bytes + at)};
}

/* Calls f with a unit that divides rows, scales and strips; keys and values have equal rows. */
template <class F> int with_unit(const kvl_pages &src, const kvl_pages &dst, F f) {
  const kvl_strips &k = src.key, &v = src.value;
  if (k.bytes_row != v.bytes_row) return kvl__cuda_check(cudaErrorInvalidValue);
  const int64_t all = k.bytes_row | 2 * k.groups | src.bytes_page | k.bytes | v.begin |
                      k.scales;
  if (all % 16 == 0 && aligned16(src.memory, dst.memory)) return f(uint4());
  return all % 4 == 0 ? f(uint32_t()) : f(uint16_t());
}

}  // namespace kvl

#endif
