// Sixteen float32 numbers, whatever the width of the processor's registers: a sum over them has one order everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace machd {
// One namespace for each instruction set that the file is compiled for, so that the linker keeps all of them.
namespace MACHD_TARGET {

constexpr int kBlock = 16;  // numbers of a vector

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kBlock / kLanes;

typedef float FloatPart __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordPart __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntPart __attribute__((vector_size(4 * kLanes)));

inline FloatPart fused(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  FloatPart result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
#endif
}

struct Vector {
  FloatPart part[kParts];

  static Vector zeros() {
    Vector result;
    for (int p = 0; p < kParts; ++p) result.part[p] = FloatPart{};
    return result;
  }

  static Vector load(const float* from) {
    Vector result;
    std::memcpy(&result, from, sizeof result);
    return result;
  }

  // Zeros behind the first `count` numbers.
  static Vector load_some(const float* from, int count) {
    float padded[kBlock] = {};
    std::memcpy(padded, from, sizeof(float) * count);
    return load(padded);
  }

  void store(float* to) const { std::memcpy(to, this, sizeof *this); }
};

// a * b + c, rounded once.
inline Vector fused(Vector a, Vector b, Vector c) {
  Vector result;
  for (int p = 0; p < kParts; ++p) result.part[p] = fused(a.part[p], b.part[p], c.part[p]);
  return result;
}

// The sum of the sixteen numbers: the upper half is added to the lower one until one number is left.
inline float sum(Vector v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.part[0]), _mm512_extractf32x8_ps(v.part[0], 1));
#else
  const __m256 eight = _mm256_add_ps(v.part[0], v.part[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kBlock];
  v.store(lanes);
  for (int half = kBlock / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

inline FloatPart in_all_lanes(float number) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(number);
#elif defined(__AVX2__)
  return _mm256_set1_ps(number);
#elif defined(__ARM_NEON)
  return vdupq_n_f32(number);
#else
  return FloatPart{} + number;  // an addition, which would not be left out: zero may have a sign
#endif
}

// table[indices], lane by lane; of an index only the lowest bits count, as many as there are in the number of lanes.
inline WordPart looked_up(WordPart table, WordPart indices) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordPart>(
      _mm512_permutexvar_epi32(reinterpret_cast<__m512i>(indices), reinterpret_cast<__m512i>(table)));
#elif defined(__AVX2__)
  return reinterpret_cast<WordPart>(
      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(indices)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  // The processor looks up bytes: an index becomes those of its lane's four.
  const WordPart bytes = (indices & 3) * 0x04040404u + 0x03020100u;
  return reinterpret_cast<WordPart>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(bytes)));
#else
  WordPart result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = table[indices[lane] % kLanes];
  return result;
#endif
}

inline FloatPart looked_up(FloatPart table, WordPart indices) {
  return reinterpret_cast<FloatPart>(looked_up(reinterpret_cast<WordPart>(table), indices));
}

inline float from_half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(__ARM_NEON)
  __fp16 number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7fff;
  uint32_t wide = sign;
  if (rest >= 0x7c00) wide |= 0x7f800000 | (rest & 0x3ff) << 13;
  else if (rest >= 0x0400) wide |= (rest << 13) + 0x38000000;
  else {
    const float small = rest * 0x1p-24f;
    return sign ? -small : small;
  }
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
#endif
}

inline float from_brain(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

}  // namespace MACHD_TARGET
}  // namespace machd
