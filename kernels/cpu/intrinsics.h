/* The intrinsics of AVX2 and AVX-512 that kernels use. gcc's immintrin.h defines those of all
 * extensions, whichever are enabled, and takes half a second of every compilation; its parts
 * for AVX2 take 60 ms. The parts want to be included from immintrin.h, in its order, which is
 * what the macro claims. A gcc that has other parts, and other compilers, get all of it. */
#ifndef KVL_CPU_INTRINSICS_H
#define KVL_CPU_INTRINSICS_H

#if defined(__GNUC__) && !defined(__clang__) && !defined(_IMMINTRIN_H_INCLUDED) && \
    __has_include(<avx2intrin.h>) && __has_include(<f16cintrin.h>) && \
    __has_include(<avx512vlbwintrin.h>) && __has_include(<avx512vpopcntdqintrin.h>)
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>

#include <avxintrin.h>

#include <avx2intrin.h>
#if defined(KVL_ISA_AVX512)
#include <avx512fintrin.h>

#include <avx512vlintrin.h>

#include <avx512bwintrin.h>

#include <avx512dqintrin.h>

#include <avx512vlbwintrin.h>

#include <avx512vpopcntdqintrin.h>
#endif
#include <fmaintrin.h>

#include <f16cintrin.h>
#else
#include <immintrin.h>
#endif

#endif
