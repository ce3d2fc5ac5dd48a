// SPDX-License-Identifier: Apache-2.0
//
// What changed since the last run: compare, compact, and write into place; see entries.py for the forms.
// Compiled behind copy_parts.cu, whose number formats it uses. A block of threads takes a tile of one chunk,
// each thread EACH units of it that follow each other.

#define CHANGE_TILE 4096  // units; also in delta_sizes.py
#define EACH 16           // units a thread
#define THREADS (CHANGE_TILE / EACH)
#define SECTION 16        // bytes; sections of a form start at multiples of it

enum Form { LIST, MAP, DENSE };

// Rows that the host prepares once.
struct Outgoing {
  i64 packed, baseline, units, unit, first_tile, number;
};
struct Arrival {
  i64 number, units, unit, first_tile, first_span, stop_span, tangled;
};
struct Span {
  i64 offset, stop, start, cell;  // bytes in the chunk; first byte in the cell's stream; the cell
};
struct Target {
  i64 address, shape;
};
struct Shape {
  i64 item, cast, extent[DIMENSIONS], stride[DIMENSIONS];  // slowest first; bytes
};
// What a run finds out of each chunk.
struct Travel {
  i64 address, form, entries;
};

__device__ i64 padded(i64 nbytes) { return (nbytes + SECTION - 1) / SECTION * SECTION; }

// The last row whose first tile is not after `tile`.
template <class Row>
__device__ const Row& row_of(const Row* rows, int count, i64 tile) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    int middle = (low + high) / 2;
    if (rows[middle].first_tile <= tile) low = middle;
    else high = middle;
  }
  return rows[low];
}

// The sections of a sparse form.
template <class Unit>
struct Sparse {
  u32* first;
  unsigned short* places;  // or bits
  Unit* values;

  __device__ Sparse(const Travel& travel, i64 units) {
    i64 at = travel.address;
    first = (u32*)at;
    at += padded(4 * ((units + CHANGE_TILE - 1) / CHANGE_TILE));
    places = (unsigned short*)at;
    at += padded(travel.form == LIST ? 2 * travel.entries : (units + 7) / 8);
    values = (Unit*)at;
  }
};

// Sum of the threads before this one, and of all.
__device__ u32 sum_before(u32 mine, u32* total) {
  __shared__ u32 sums[THREADS / WARP];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u32 upto = mine;
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    u32 other = __shfl_up_sync(ALL_LANES, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();
  if (lane == WARP - 1) sums[warp] = upto;
  __syncthreads();
  u32 before = upto - mine;
  *total = 0;
#pragma unroll
  for (int w = 0; w < THREADS / WARP; ++w) {
    if (w < warp) before += sums[w];
    *total += sums[w];
  }
  return before;
}

// Which of a thread's units differ, a bit each.
template <class Unit>
__device__ u32 differing(const Unit* now, const Unit* then, i64 count) {
  u32 bits = 0;
  if (count < EACH) {
    for (int i = 0; i < count; ++i) bits |= (u32)(now[i] != then[i]) << i;
    return bits;
  }
  const int WORDS = EACH * sizeof(Unit) / sizeof(uint4), IN_WORD = sizeof(uint4) / sizeof(Unit);
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    union Word {
      uint4 wide;
      Unit units[IN_WORD];
    } a, b;
    a.wide = ((const uint4*)now)[w];
    b.wide = ((const uint4*)then)[w];
#pragma unroll
    for (int i = 0; i < IN_WORD; ++i) bits |= (u32)(a.units[i] != b.units[i]) << (w * IN_WORD + i);
  }
  return bits;
}

template <class Unit>
__device__ void count_tile(const Outgoing& chunk, i64 tile, u32* counts) {
  i64 at = (tile - chunk.first_tile) * CHANGE_TILE + threadIdx.x * EACH;
  i64 left = min((i64)EACH, chunk.units - at);
  u32 bits = left > 0 ? differing((const Unit*)chunk.packed + at, (const Unit*)chunk.baseline + at, left) : 0;
  u32 total;
  sum_before(__popc(bits), &total);
  if (threadIdx.x == 0) counts[tile] = total;
}

template <class Unit>
__device__ void encode_tile(const Outgoing& chunk, i64 tile, const u32* first, const Travel& travel) {
  i64 within = tile - chunk.first_tile, at = within * CHANGE_TILE + threadIdx.x * EACH;
  i64 left = min((i64)EACH, chunk.units - at);
  const Unit* now = (const Unit*)chunk.packed + at;
  Unit* then = (Unit*)chunk.baseline + at;
  if (travel.form == DENSE) {
    i64 base = within * CHANGE_TILE, stop = min(base + CHANGE_TILE, chunk.units);
    for (i64 i = base + threadIdx.x; i < stop; i += THREADS)
      ((Unit*)travel.address)[i] = ((Unit*)chunk.baseline)[i] = ((const Unit*)chunk.packed)[i];
    return;
  }
  u32 bits = left > 0 ? differing(now, then, left) : 0, total;
  i64 entry = first[tile] + sum_before(__popc(bits), &total);
  Sparse<Unit> to(travel, chunk.units);
  if (threadIdx.x == 0) to.first[within] = first[tile];
  if (travel.form == MAP && left > 0) to.places[at / EACH] = (unsigned short)bits;
  for (; bits && entry < travel.entries; bits &= bits - 1, ++entry) {
    int i = __ffs(bits) - 1;
    to.values[entry] = then[i] = now[i];
    if (travel.form == LIST) to.places[entry] = (unsigned short)(threadIdx.x * EACH + i);
  }
}

template <class Unit>
__device__ void write_unit(const Span& span, i64 at, const Unit* value, const Target* targets, const Shape* shapes) {
  const Target& target = targets[span.cell];
  const Shape& shape = shapes[target.shape];
  i64 byte = at - span.offset + span.start, element = byte / shape.item, rest = byte - element * shape.item;
  if (shape.cast && rest) return;  // in a dense chunk of several units an element: the first one's unit does it
  i64 address = target.address + rest;
#pragma unroll 1
  for (int d = DIMENSIONS - 1; d >= 0 && element; --d) {
    i64 outer = element / shape.extent[d];
    address += (element - outer * shape.extent[d]) * shape.stride[d];
    element = outer;
  }
  if (shape.cast) store_double((int)shape.cast % 16, address, load_as_double((int)shape.cast / 16, (i64)value));
  else if (address % sizeof(Unit) == 0) *(Unit*)address = *value;
  else
    for (int i = 0; i < sizeof(Unit); ++i) ((char*)address)[i] = ((const char*)value)[i];
}

// Write a unit to every place that it belongs to.
template <class Unit>
__device__ void apply_unit(const Arrival& chunk, i64 unit, const Unit* value, const Span* spans,
                           const Target* targets, const Shape* shapes) {
  i64 at = unit * sizeof(Unit), low = chunk.first_span, high = chunk.stop_span;
  while (!chunk.tangled && high - low > 1) {
    i64 middle = (low + high) / 2;
    if (spans[middle].offset <= at) low = middle;
    else high = middle;
  }
  for (i64 k = low; k < high; ++k)
    if (spans[k].offset <= at && at < spans[k].stop) write_unit(spans[k], at, value, targets, shapes);
}

template <class Unit>
__device__ void apply_tile(const Arrival& chunk, i64 tile, const Travel& travel, const Span* spans,
                           const Target* targets, const Shape* shapes) {
  i64 within = tile - chunk.first_tile, base = within * CHANGE_TILE, at = base + threadIdx.x * EACH;
  i64 left = min((i64)EACH, chunk.units - at);
  if (travel.form == DENSE) {
    const Unit* from = (const Unit*)travel.address;
    for (i64 i = base + threadIdx.x; i < min(base + CHANGE_TILE, chunk.units); i += THREADS)
      apply_unit(chunk, i, from + i, spans, targets, shapes);
    return;
  }
  Sparse<Unit> from(travel, chunk.units);
  i64 entry = from.first[within], stop = travel.entries;
  if (base + CHANGE_TILE < chunk.units) stop = from.first[within + 1];
  if (travel.form == LIST) {
    for (entry += threadIdx.x; entry < stop; entry += THREADS)
      apply_unit(chunk, base + from.places[entry], from.values + entry, spans, targets, shapes);
    return;
  }
  u32 bits = left > 0 ? from.places[at / EACH] : 0, total;
  for (entry += sum_before(__popc(bits), &total); bits && entry < stop; bits &= bits - 1, ++entry)
    apply_unit(chunk, at + __ffs(bits) - 1, from.values + entry, spans, targets, shapes);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count_changed(const Outgoing* chunks, int count, i64 base, u32* counts) {
  i64 tile = base + blockIdx.x;
  const Outgoing& chunk = row_of(chunks, count, tile);
  switch (chunk.unit) {
    case 1: count_tile<unsigned char>(chunk, tile, counts); break;
    case 2: count_tile<unsigned short>(chunk, tile, counts); break;
    case 4: count_tile<u32>(chunk, tile, counts); break;
    default: count_tile<u64>(chunk, tile, counts);
  }
}

// Turn the counts of each chunk's tiles into the first entry of each, and tell how many there are in all:
// every unit where what the destinations have is not known. One block of threads a chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_counts(const Outgoing* chunks, const unsigned char* fresh, u32* counts, u32* entries) {
  const Outgoing& chunk = chunks[blockIdx.x];
  i64 tiles = (chunk.units + CHANGE_TILE - 1) / CHANGE_TILE;
  u32 before = 0, total;
  for (i64 i = 0; i < tiles; i += THREADS) {
    bool mine = i + threadIdx.x < tiles;
    u32* at = counts + chunk.first_tile + i + threadIdx.x;
    u32 first = before + sum_before(mine ? *at : 0, &total);
    if (mine) *at = first;
    before += total;
  }
  if (threadIdx.x == 0) entries[blockIdx.x] = fresh[blockIdx.x] ? (u32)chunk.units : before;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    encode_changed(const Outgoing* chunks, int count, i64 base, const u32* first, const Travel* travels) {
  i64 tile = base + blockIdx.x;
  const Outgoing& chunk = row_of(chunks, count, tile);
  const Travel& travel = travels[chunk.number];
  if (!travel.entries) return;
  switch (chunk.unit) {
    case 1: encode_tile<unsigned char>(chunk, tile, first, travel); break;
    case 2: encode_tile<unsigned short>(chunk, tile, first, travel); break;
    case 4: encode_tile<u32>(chunk, tile, first, travel); break;
    default: encode_tile<u64>(chunk, tile, first, travel);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    apply_changed(const Arrival* chunks, int count, const Travel* travels, const Span* spans, const Target* targets,
                  const Shape* shapes) {
  i64 tile = chunks[0].first_tile + blockIdx.x;
  const Arrival& chunk = row_of(chunks, count, tile);
  const Travel& travel = travels[chunk.number];
  if (!travel.entries) return;
  switch (chunk.unit) {
    case 1: apply_tile<unsigned char>(chunk, tile, travel, spans, targets, shapes); break;
    case 2: apply_tile<unsigned short>(chunk, tile, travel, spans, targets, shapes); break;
    case 4: apply_tile<u32>(chunk, tile, travel, spans, targets, shapes); break;
    default: apply_tile<u64>(chunk, tile, travel, spans, targets, shapes);
  }
}
