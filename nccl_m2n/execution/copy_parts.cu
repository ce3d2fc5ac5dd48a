// SPDX-License-Identifier: Apache-2.0
//
// Every copy of one launch: parts of boxes of any strides, packed, unpacked or moved within the rank.
// A copy is one row of `COPY` in descriptors.py. A warp takes a tile of one copy at a time, so a launch
// balances however many copies there are and however long each is.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define DIMENSIONS 8
#define MANY_ROWS (1 << 20)  // more than a tile has
#define ALL_LANES 0xffffffffu

// Settings, measured on an H200 with bench/pack.py; -D tries others. The first two are kernels.py's too.
#ifndef WARPS_PER_BLOCK
#define WARPS_PER_BLOCK 2
#endif
#ifndef TILE_BYTES
#define TILE_BYTES 8192
#endif
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 16
#endif
#ifndef SHORT_RUN
#define SHORT_RUN 256  // bytes; runs from here on are worth realigning
#endif
#ifndef BATCH
#define BATCH 4  // loads that a lane has under way
#endif

// The fields of `COPY`, in its order. 32 of them: each lane of a warp fetches one. The first four come from
// the copy's own row, where the number of its shape follows them; the others from that shape.
#define PLACE_FIELDS 4
#define SHAPE_FIELDS (WARP - PLACE_FIELDS)
struct Copy {
  i64 source, destination, start, stop, run, source_unit, destination_unit, cast;
  i64 extent[DIMENSIONS], source_stride[DIMENSIONS], destination_stride[DIMENSIONS];
};

// Where a tile begins: in the run whose outer indices are `index`.
struct Tile {
  i64 source, destination;  // addresses of the first unit
  u32 count;                // units in the tile
  u32 in_first;             // of them, those before the first run ends
  u32 run;                  // units of a run, or more than a tile's
  u32 inverse;              // ceil(2^31 / run)
  bool straight;            // no carry beyond the first outer dimension in the whole tile
  i64 source_jump;          // from one past a run's end to the next run, within the first outer dimension
  i64 destination_jump;
};

// All that the lanes of a warp share about what they are doing.
struct Work {
  Copy copy;
  Tile tile;
  i64 index[DIMENSIONS];
};

// One lane's place in its tile.
struct Cursor {
  i64 source, destination;
  int left;  // units to the end of the run, this one counted
  int rows;  // runs to the end of the first outer dimension, this one counted
};

// One lane's field of a copy.
__device__ i64 fetch_field(const i64* rows, const i64* shapes, int number, i64 shape, int lane) {
  const i64* row = rows + (i64)number * (PLACE_FIELDS + 1);
  return lane < PLACE_FIELDS ? row[lane] : shapes[shape * SHAPE_FIELDS + lane - PLACE_FIELDS];
}

// Fill in the work's tile; by one lane.
__device__ void begin_tile(Work& work, i64 tile) {
  const Copy& copy = work.copy;
  u32 units = TILE_BYTES / (u32)max(copy.source_unit, copy.destination_unit);
  i64 begin = copy.start + tile * units;
  i64 row = begin < copy.run ? 0 : begin / copy.run;
  i64 column = begin - row * copy.run;
  Tile here;
  here.count = (u32)min((i64)units, copy.stop - begin);
  here.in_first = (u32)min((i64)here.count, copy.run - column);
  here.run = (u32)min(copy.run, (i64)TILE_BYTES);
  here.inverse = (0x80000000u + here.run - 1) / here.run;
  here.source_jump = copy.source_stride[0] - copy.run * copy.source_unit;
  here.destination_jump = copy.destination_stride[0] - copy.run * copy.destination_unit;
  here.source = copy.source + column * copy.source_unit;
  here.destination = copy.destination + column * copy.destination_unit;
#pragma unroll 1
  for (int d = 0; d < DIMENSIONS; ++d) {
    i64 next = row < copy.extent[d] ? 0 : row / copy.extent[d];
    i64 i = row - next * copy.extent[d];
    here.source += i * copy.source_stride[d];
    here.destination += i * copy.destination_stride[d];
    work.index[d] = i;
    row = next;
  }
  u32 further = (here.count - here.in_first + here.run - 1) / here.run;  // runs after the first
  here.straight = work.index[0] + further < copy.extent[0];
  work.tile = here;
}

// Find a unit of the tile from the tile's beginning. Carries from dimension to dimension without a 64-bit
// division: all that is divided is less than the units of a tile.
__device__ Cursor find_unit(const Work& work, u32 unit) {
  const Copy& copy = work.copy;
  const Tile& here = work.tile;
  Cursor at = {here.source + unit * copy.source_unit, here.destination + unit * copy.destination_unit,
               (int)(here.in_first - unit), MANY_ROWS};
  i64 row = work.index[0];
  if (unit >= here.in_first) {
    u32 past = unit - here.in_first;
    u32 runs = __umulhi(past << 1, here.inverse);  // past / run, exact since both are below 2^14
    i64 steps = runs + 1;
    at.left = (int)(here.run - (past - runs * here.run));
    at.source += steps * here.source_jump;
    at.destination += steps * here.destination_jump;
    row += steps;
  }
  if (here.straight) return at;
  at.rows = (int)min(copy.extent[0] - row, (i64)MANY_ROWS);
#pragma unroll 1
  for (int d = 0; row >= copy.extent[d]; ++d) {
    i64 over = row - copy.extent[d];
    i64 wraps = over < copy.extent[d] ? 1 : 1 + (u32)over / (u32)copy.extent[d];
    at.source += wraps * (copy.source_stride[d + 1] - copy.extent[d] * copy.source_stride[d]);
    at.destination += wraps * (copy.destination_stride[d + 1] - copy.extent[d] * copy.destination_stride[d]);
    if (d == 0) at.rows = (int)min((1 + wraps) * copy.extent[0] - row, (i64)MANY_ROWS);
    row = work.index[d + 1] + wraps;
  }
  return at;
}

// A lane's way through its tile, WARP units at a time and by additions only, until it would have to carry
// beyond the first outer dimension. Then it ends, and `find_unit` begins another.
struct Walker {
  Cursor now;
  i64 source_step, destination_step, source_jump, destination_jump;
  int run, left_step, rows_step;
  u32 unit, count;

  __device__ Walker(const Work& work, Cursor at, u32 first) : now(at), unit(first), count(work.tile.count) {
    run = (int)work.tile.run;
    source_jump = work.tile.source_jump;
    destination_jump = work.tile.destination_jump;
    rows_step = (int)__umulhi(WARP << 1, work.tile.inverse);
    left_step = WARP - rows_step * run;
    source_step = WARP * work.copy.source_unit + rows_step * source_jump;
    destination_step = WARP * work.copy.destination_unit + rows_step * destination_jump;
  }

  // Whether it is still on its way, and for that many units at least.
  __device__ bool goes_on() const { return unit < count && now.rows > 0; }
  __device__ bool goes_on_for(int units) const { return now.rows > units * (rows_step + 1); }

  __device__ void step() {
    unit += WARP;
    now.source += source_step;
    now.destination += destination_step;
    now.left -= left_step;
    now.rows -= rows_step;
    if (now.left <= 0) {
      now.left += run;
      now.source += source_jump;
      now.destination += destination_jump;
      now.rows -= 1;
    }
  }
};

// Move a contiguous tile, from a lane's first unit on.
__device__ u32 move_contiguous(const Work& work, Cursor at, u32 unit) {
  const uint4* source = (const uint4*)at.source;
  uint4* destination = (uint4*)at.destination;
  int left = ((int)(work.tile.count - unit) + WARP - 1) / WARP;
#pragma unroll 1
  for (; left >= BATCH; left -= BATCH, source += BATCH * WARP, destination += BATCH * WARP) {
    uint4 held[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) held[i] = source[i * WARP];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) destination[i * WARP] = held[i];
  }
#pragma unroll 1
  for (; left > 0; --left, source += WARP, destination += WARP) *destination = *source;
  return work.tile.count;
}

// Move one run of any alignment: 16-byte stores, each put together from the aligned words around its source.
// The bytes before and after the stores move one by one, those of both ends at once.
__device__ void move_run(i64 source, i64 destination, u32 length, int lane) {
  u32 head = min(length, (u32)-destination % 16);
  u32 stores = (length - head) / 16, tail = head + 16 * stores;
  u32 end = lane < 16 ? lane : tail + lane - 16;
  if (lane < 16 ? end < head : end < length) *(char*)(destination + end) = *(const char*)(source + end);
  u32 bits = (u32)(source + head) % 4 * 8;
  const u32* words = (const u32*)(source + head - bits / 8);
  uint4* to = (uint4*)(destination + head);
#pragma unroll 1
  for (u32 at = lane; at < stores; at += WARP) {
    u32 held[5];
#pragma unroll
    for (int w = 0; w < 4; ++w) held[w] = words[4 * at + w];
    held[4] = bits ? words[4 * at + 4] : 0;  // an aligned source may end with the allocation
#pragma unroll
    for (int w = 0; w < 4; ++w) held[w] = __funnelshift_r(held[w], held[w + 1], bits);
    to[at] = {held[0], held[1], held[2], held[3]};
  }
}

// Floating-point formats, numbered as in dtypes.py.
enum Format { FLOAT64 = 1, FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 };

// What tells one small format from another. E4M3FN has no infinity: its largest code is its one NaN.
struct Small {
  u32 bits, mantissa, bias, infinity, nan;
};

__device__ Small small_format(int format) {
  switch (format) {
    case FLOAT16: return {16, 10, 15, 0x7c00, 0x7e00};
    case BFLOAT16: return {16, 7, 127, 0x7f80, 0x7fc0};
    case FLOAT8_E4M3FN: return {8, 3, 7, 0x7f, 0x7f};
    default: return {8, 2, 15, 0x7c, 0x7e};
  }
}

__device__ float widen_small(u32 code, Small format) {
  u32 sign = code >> (format.bits - 1) << 31;
  u32 magnitude = code & ((1u << (format.bits - 1)) - 1);
  u32 mantissa = magnitude & ((1u << format.mantissa) - 1);
  u32 exponent = magnitude >> format.mantissa;
  if (magnitude >= format.nan || magnitude > format.infinity) return __uint_as_float(sign | 0x7fc00000u);
  if (magnitude == format.infinity) return __uint_as_float(sign | 0x7f800000u);
  if (exponent == 0) {  // mantissa * 2^(1 - bias - mantissa bits), in two factors that float can hold
    float value = (float)mantissa * __uint_as_float((127u - format.mantissa) << 23);
    value *= format.bias == 127 ? __uint_as_float(1u << 23) : __uint_as_float((128u - format.bias) << 23);
    return __uint_as_float(__float_as_uint(value) | sign);
  }
  return __uint_as_float(sign | (exponent + 127 - format.bias) << 23 | mantissa << (23 - format.mantissa));
}

// Round to nearest, ties to even.
__device__ u32 narrow_float(float value, Small format) {
  u32 code = __float_as_uint(value);
  u32 sign = code >> 31 << (format.bits - 1);
  u32 magnitude = code & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | format.nan;
  int exponent = magnitude < 0x00800000u ? -126 : (int)(magnitude >> 23) - 127;
  u32 mantissa = magnitude < 0x00800000u ? magnitude : (magnitude & 0x7fffffu) | 0x800000u;
  int least = 1 - (int)format.bias;
  int shift = 23 - (int)format.mantissa + max(0, least - exponent);
  if (shift > 25) return sign;
  u32 rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
  u32 result = ((u32)(max(exponent, least) - least) << format.mantissa) + rounded;
  return sign | min(result, format.infinity);
}

__device__ double load_as_double(int format, i64 address) {
  switch (format) {
    case FLOAT64: return *(const double*)address;
    case FLOAT32: return *(const float*)address;
    case FLOAT16:
    case BFLOAT16: return widen_small(*(const unsigned short*)address, small_format(format));
    default: return widen_small(*(const unsigned char*)address, small_format(format));
  }
}

__device__ void store_double(int format, i64 address, double value) {
  switch (format) {
    case FLOAT64: *(double*)address = value; break;
    case FLOAT32: *(float*)address = (float)value; break;
    case FLOAT16:
    case BFLOAT16: *(unsigned short*)address = narrow_float((float)value, small_format(format)); break;
    default: *(unsigned char*)address = narrow_float((float)value, small_format(format));
  }
}

// One unit on its way through a lane's registers: 16 bytes, or a number to cast.
union Held {
  uint4 wide;
  u64 narrow;
  double number;
};

__device__ Held load_unit(const Copy& copy, i64 address) {
  Held held;
  if (copy.cast) {
    held.number = load_as_double((int)copy.cast / 16, address);
    return held;
  }
  switch (copy.source_unit) {
    case 16: held.wide = *(const uint4*)address; break;
    case 8: held.narrow = *(const u64*)address; break;
    case 4: held.narrow = *(const u32*)address; break;
    case 2: held.narrow = *(const unsigned short*)address; break;
    default: held.narrow = *(const unsigned char*)address;
  }
  return held;
}

__device__ void store_unit(const Copy& copy, i64 address, Held held) {
  if (copy.cast) {
    store_double((int)copy.cast % 16, address, held.number);
    return;
  }
  switch (copy.source_unit) {
    case 16: *(uint4*)address = held.wide; break;
    case 8: *(u64*)address = held.narrow; break;
    case 4: *(u32*)address = (u32)held.narrow; break;
    case 2: *(unsigned short*)address = (unsigned short)held.narrow; break;
    default: *(unsigned char*)address = (unsigned char)held.narrow;
  }
}

// Move units of a tile, from a lane's first one on, and return the lane's first unit that is left. Loads of a
// batch are all issued before its first store: the compiler cannot know that source and destination do not
// overlap, and would wait for each load in turn.
__device__ u32 move_units(const Work& work, Cursor at, u32 unit) {
  Walker walker(work, at, unit);
#pragma unroll 1
  while (walker.goes_on()) {
    if (!walker.goes_on_for(BATCH)) {
      store_unit(work.copy, walker.now.destination, load_unit(work.copy, walker.now.source));
      walker.step();
      continue;
    }
    u32 first = walker.unit;
    i64 destination[BATCH];
    Held held[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i, walker.step()) {
      if (walker.unit < walker.count) held[i] = load_unit(work.copy, walker.now.source);
      destination[i] = walker.now.destination;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i * WARP < walker.count) store_unit(work.copy, destination[i], held[i]);
  }
  return walker.unit;
}

enum Way { CONTIGUOUS, RUNS, UNITS };

__device__ Way choose_way(const Work& work) {
  u32 unit = (u32)work.copy.source_unit;
  bool contiguous = work.tile.in_first == work.tile.count;
  if (work.copy.cast) return UNITS;
  if (unit == 16) return contiguous ? CONTIGUOUS : UNITS;
  return contiguous || work.tile.run * unit >= SHORT_RUN ? RUNS : UNITS;
}

// A hint tells which copy the first tile of a block belongs to, and that copy's shape. Nearly always it is
// right for all the block's tiles, so everything is fetched at once on the guess that it is.
extern "C" __global__ void __launch_bounds__(WARP* WARPS_PER_BLOCK, BLOCKS_PER_SM)
    copy_parts(const i64* rows, const i64* shapes, const int* first_tile, const int2* hints, int count,
               int tiles) {
  __shared__ Work works[WARPS_PER_BLOCK];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int tile = blockIdx.x * WARPS_PER_BLOCK + warp;
  if (tile >= tiles) return;
  Work& work = works[warp];
  int2 hint = hints[blockIdx.x];
  i64 field = fetch_field(rows, shapes, hint.x, hint.y, lane);
  int begins = first_tile[hint.x], number = hint.x;
  // The tile's own copy is the last whose first tile is not after it. A block's warps work on tiles that follow each
  // other, so it is the hint or comes soon after: the lanes look at the next 32 copies at once, and since first tiles
  // rise, as many as have begun is how far to go. All of them: perhaps more have, so look on. A binary search would be
  // fewer steps only where copies are shorter than a tile by the dozen, and its loads would wait for one another.
  for (u32 passed = ALL_LANES; passed == ALL_LANES;) {
    int next = number + 1 + lane;
    passed = __ballot_sync(ALL_LANES, next < count && first_tile[next] <= tile);
    number += __popc(passed);
  }
  if (number != hint.x) {
    field = fetch_field(rows, shapes, number, rows[(i64)number * (PLACE_FIELDS + 1) + PLACE_FIELDS], lane);
    begins = first_tile[number];
  }
  ((i64*)&work.copy)[lane] = field;
  __syncwarp();
  if (lane == 0) begin_tile(work, tile - begins);
  __syncwarp();
  Way way = choose_way(work);
  // Lanes move every 32nd unit, but whole runs together.
  u32 unit = way == RUNS ? 0 : lane;
#pragma unroll 1
  while (unit < work.tile.count) {
    Cursor at = find_unit(work, unit);
    switch (way) {
      case CONTIGUOUS: unit = move_contiguous(work, at, unit); break;
      case RUNS: {
        u32 length = min((u32)at.left, work.tile.count - unit);
        move_run(at.source, at.destination, length * (u32)work.copy.source_unit, lane);
        unit += length;
        break;
      }
      case UNITS: unit = move_units(work, at, unit);
    }
  }
}
