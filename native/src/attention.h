// Attention of one row's tokens over the keys and values of one head.
#pragma once

#include <cstdint>
#include <limits>

namespace machd {

// Keys and values one column after another, each `head_dim` and `value_dim` numbers that lie together.
struct KvPart {
  const float* keys;
  const float* values;
  long columns;
  long key_step;    // numbers from one column's key to the next
  long value_step;  // the same of values
  long ring = 0;    // columns of a ring, where a position lies in column (position + shift) % ring; 0 where they lie in order
  long shift = 0;

  long column(long position) const { return ring == 0 ? position : (position + shift) % ring; }
};

// What `repeats` heads of queries ask of one head of keys. Token t of the pass sees the positions up to before + t, its own, of
// those that the parts hold; with a window only the last ones of them.
struct Attention {
  const float* queries;  // a query's numbers lie together
  long query_token_step;
  long query_head_step;
  float* out;
  long out_token_step;
  long out_head_step;
  long repeats;
  long head_dim;   // a multiple of 16
  long value_dim;  // the same
  KvPart parts[2];  // the second one behind the first
  long before;
  long window;  // positions that a token sees, itself included; 0 for all
  float scale;

  // Positions that the parts hold; a whole ring holds all that its tokens see.
  long held() const {
    const bool is_whole = parts[1].ring != 0 && parts[1].ring <= parts[1].columns;
    return is_whole ? std::numeric_limits<long>::max() : parts[0].columns + parts[1].columns;
  }
};

// Queries that are worked on together: their sums stay in the first cache while keys and values pass.
constexpr long kTileQueries = 48;

inline long tile_tokens(long repeats) {
  return repeats < kTileQueries ? kTileQueries / repeats : 1;
}

// Computes the tokens from `begin` to `end`, at most tile_tokens() of them.
//
// A sum is taken in one order, which depends on positions alone: over blocks of 64 of them, from the row's first one on. So a token's
// bits are the same computed alone, in a batch, or as part of a prompt, and wherever a prefix ends that rows share.
//
// scratch: attend_scratch_bytes() of the calling thread's own, aligned to 64.
using Attend = void (*)(const Attention& attention, long begin, long end, void* scratch);

// Bytes for a tile of so many queries.
using AttendScratchBytes = long (*)(long queries, long head_dim, long value_dim);

}  // namespace machd
