#include "attention.h"

#include <algorithm>
#include <limits>

#include "kernels.h"
#include "vectors.h"

namespace machd {
namespace MACHD_TARGET {
namespace {

constexpr long kColumns = 64;  // positions of a block
constexpr int kVectors = kColumns / kBlock;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Vectors of scores, queries, and vectors of a value, whose sums are in registers.
constexpr int kScoreSums = kParts == 1 ? 16 : 4;
constexpr int kMixQueries = kParts == 1 ? 4 : 2;
constexpr int kMixVectors = kParts == 1 ? 4 : 2;

// A tile's memory, and the block that it is at.
struct Tile {
  float* queries;  // [count, head_dim], scaled for powers of two
  float* keys;     // [head_dim, kColumns], the block's keys turned round
  float* weights;  // [count, kColumns], scores at first
  float* sums;     // [count, value_dim], of weights times values so far
  float* highest;  // [count], scores so far
  float* totals;   // [count], of weights so far
  float* factors;  // [count], of what was summed before, since the highest score has risen; negative where the block is not seen
  long count;
  const float* values[kColumns];

  Tile(void* scratch, long count, long head_dim, long value_dim) : count(count) {
    queries = static_cast<float*>(scratch);
    keys = queries + count * head_dim;
    weights = keys + kColumns * head_dim;
    sums = weights + count * kColumns;
    highest = sums + count * value_dim;
    totals = highest + count;
    factors = totals + count;
    std::fill_n(sums, count * value_dim, 0.0f);
    std::fill_n(highest, count, kNone);
    std::fill_n(totals, count, 0.0f);
  }
};

const float* key_at(const Attention& a, long position) {
  const bool is_own = position >= a.parts[0].columns;
  const KvPart& part = a.parts[is_own];
  return part.keys + (position - (is_own ? a.parts[0].columns : 0)) * part.key_step;
}

const float* value_at(const Attention& a, long position) {
  const bool is_own = position >= a.parts[0].columns;
  const KvPart& part = a.parts[is_own];
  return part.values + (position - (is_own ? a.parts[0].columns : 0)) * part.value_step;
}

// Has memory bring numbers that are wanted a little later.
void ask_early(const float* numbers, long count) {
  for (long at = 0; at < count; at += kBlock) __builtin_prefetch(numbers + at);
}

void turn_keys(const Attention& a, long from, long columns, float* turned) {
  for (long column = 0; column < columns; column += kLanes) {
    const long here = std::min<long>(kLanes, columns - column);
    const float* keys[kLanes];
    for (long lane = 0; lane < here; ++lane) {
      keys[lane] = key_at(a, from + column + lane);
      ask_early(keys[lane] + kColumns * a.parts[1].key_step, a.head_dim);  // of the next block
    }
    for (long d = 0; d < a.head_dim; d += kLanes) {
      FloatPart rows[kLanes];
      for (long lane = 0; lane < kLanes; ++lane) {
        rows[lane] = lane < here ? part_at(keys[lane] + d) : FloatPart{};
      }
      transpose(rows);
      for (long lane = 0; lane < kLanes; ++lane) store(rows[lane], turned + (d + lane) * kColumns + column);
    }
  }
}

// kUsed: vectors of the block in which there are columns.
template <int kQueries, int kUsed>
void score(const Tile& tile, long query, long head_dim) {
  Vector scores[kQueries][kUsed];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < kUsed; ++v) scores[q][v] = Vector::zeros();
  const float* asking = tile.queries + query * head_dim;
  for (long d = 0; d < head_dim; ++d) {
    Vector keys[kUsed];
    for (int v = 0; v < kUsed; ++v) keys[v] = Vector::load(tile.keys + d * kColumns + v * kBlock);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const Vector number = Vector::all(asking[q * head_dim + d]);
#pragma GCC unroll 8
      for (int v = 0; v < kUsed; ++v) scores[q][v] = fused(keys[v], number, scores[q][v]);
    }
  }
  // Of columns behind the last one, too: what keys were there before may be anything, and is not looked at.
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < kUsed; ++v) scores[q][v].store(tile.weights + (query + q) * kColumns + v * kBlock);
}

// Turns a query's scores of the columns from `begin` to `end` into weights; others weigh nothing. Vectors behind the last column are
// left out, which changes no bit.
template <int kUsed>
void weigh(Tile& tile, long query, long begin, long end) {
  constexpr long kEnd = kUsed * kBlock;
  float* weights = tile.weights + query * kColumns;
  if (begin >= end) {
    std::fill_n(weights, kEnd, 0.0f);
    tile.factors[query] = -1;
    return;
  }
  for (long column = 0; column < begin; ++column) weights[column] = kNone;
  for (long column = end; column < kEnd; ++column) weights[column] = kNone;
  Vector scores[kUsed];
  for (int v = 0; v < kUsed; ++v) scores[v] = Vector::load(weights + v * kBlock);
  Vector most = scores[0];
  for (int v = 1; v < kUsed; ++v) most = larger(scores[v], most);
  const float before = tile.highest[query];
  const float highest = std::max(before, largest(most));
  const Vector shift = Vector::all(highest);
  Vector total = Vector::zeros();
  for (int v = 0; v < kUsed; ++v) {
    exp2(scores[v] - shift).store(weights + v * kBlock);
  }
  for (long column = 0; column < begin; ++column) weights[column] = 0;
  for (long column = end; column < kEnd; ++column) weights[column] = 0;
  for (int v = 0; v < kUsed; ++v) total = total + Vector::load(weights + v * kBlock);
  float factor[kBlock];
  exp2(Vector::all(before - highest)).store(factor);
  tile.highest[query] = highest;
  tile.factors[query] = factor[0];
  tile.totals[query] = __builtin_fmaf(tile.totals[query], factor[0], sum(total));
}

template <int kQueries, int kWide>
void mix(Tile& tile, long query, long columns, long d, long value_dim) {
  Vector sums[kQueries][kWide];
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q)
#pragma GCC unroll 8
    for (int v = 0; v < kWide; ++v) sums[q][v] = Vector::zeros();
  const float* weights = tile.weights + query * kColumns;
  for (long column = 0; column < columns; ++column) {
    Vector values[kWide];
    for (int v = 0; v < kWide; ++v) values[v] = Vector::load(tile.values[column] + d + v * kBlock);
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) {
      const Vector weight = Vector::all(weights[q * kColumns + column]);
#pragma GCC unroll 8
      for (int v = 0; v < kWide; ++v) sums[q][v] = fused(values[v], weight, sums[q][v]);
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < kQueries; ++q) {
    const float factor = tile.factors[query + q];
    if (factor < 0) continue;  // what is added is nothing, and might be a negative zero
    float* to = tile.sums + (query + q) * value_dim + d;
#pragma GCC unroll 8
    for (int v = 0; v < kWide; ++v) fused(Vector::load(to + v * kBlock), Vector::all(factor), sums[q][v]).store(to + v * kBlock);
  }
}

template <int kQueries>
void mix_wide(Tile& tile, long query, long columns, long value_dim) {
  long d = 0;
  for (; d + kMixVectors * kBlock <= value_dim; d += kMixVectors * kBlock)
    mix<kQueries, kMixVectors>(tile, query, columns, d, value_dim);
  for (; d < value_dim; d += kBlock) mix<kQueries, 1>(tile, query, columns, d, value_dim);
}

// Calls one.operator()<n>(query) for n queries at a time, as many as there are and kMost at the most.
template <int kMost, class One>
void by_queries(long count, One one) {
  long query = 0;
  for (; query + kMost <= count; query += kMost) one.template operator()<kMost>(query);
  if constexpr (kMost > 1)
    if (query < count) by_queries<kMost - 1>(count - query, [&]<int kQueries>(long from) { one.template operator()<kQueries>(query + from); });
}

// Calls one.operator()<n>() for the n vectors in which the first columns of a block are.
template <int kMost, class One>
void by_used(long columns, One one) {
  if constexpr (kMost > 1)
    if (columns <= (kMost - 1) * kBlock) return by_used<kMost - 1>(columns, one);
  one.template operator()<kMost>();
}

}  // namespace

long attend_scratch_bytes(long queries, long head_dim, long value_dim) {
  return long(sizeof(float)) * (queries * (head_dim + kColumns + value_dim + 3) + kColumns * head_dim);
}

void attend(const Attention& a, long begin, long end, void* scratch) {
  Tile tile(scratch, (end - begin) * a.repeats, a.head_dim, a.value_dim);
  const auto query_at = [&](long query) { return std::pair(begin + query / a.repeats, query % a.repeats); };
  const Vector scale = Vector::all(a.scale * kLog2E);
  for (long query = 0; query < tile.count; ++query) {
    const auto [token, head] = query_at(query);
    const float* from = a.queries + token * a.query_token_step + head * a.query_head_step;
    for (long d = 0; d < a.head_dim; d += kBlock) (Vector::load(from + d) * scale).store(tile.queries + query * a.head_dim + d);
  }
  const long held = a.parts[0].columns + a.parts[1].columns;
  const auto seen_to = [&](long token) { return std::min(a.before + token + 1, held); };
  const auto seen_from = [&](long token) { return a.window == 0 ? 0 : std::max<long>(0, a.before + token + 1 - a.window); };
  const long last = seen_to(end - 1);
  for (long from = seen_from(begin) / kColumns * kColumns; from < last; from += kColumns) {
    const long columns = std::min(kColumns, last - from);
    for (long column = 0; column < columns; ++column) {
      tile.values[column] = value_at(a, from + column);
      ask_early(tile.values[column], a.value_dim);
    }
    turn_keys(a, from, columns, tile.keys);
    by_used<kVectors>(columns, [&]<int kUsed>() {
      by_queries<std::min(8, kScoreSums / kUsed)>(tile.count, [&]<int kQueries>(long query) { score<kQueries, kUsed>(tile, query, a.head_dim); });
      for (long query = 0; query < tile.count; ++query) {
        const long token = query_at(query).first;
        weigh<kUsed>(tile, query, std::max<long>(0, seen_from(token) - from), std::min(columns, seen_to(token) - from));
      }
    });
    by_queries<kMixQueries>(tile.count, [&]<int kQueries>(long query) { mix_wide<kQueries>(tile, query, columns, a.value_dim); });
  }
  for (long query = 0; query < tile.count; ++query) {
    const auto [token, head] = query_at(query);
    float* to = a.out + token * a.out_token_step + head * a.out_head_step;
    const Vector total = Vector::all(tile.totals[query]);
    for (long d = 0; d < a.value_dim; d += kBlock) (Vector::load(tile.sums + query * a.value_dim + d) / total).store(to + d);
  }
}

}  // namespace MACHD_TARGET
}  // namespace machd
