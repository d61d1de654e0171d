// Arithmetic of flat buffers. Its floor is writing down the answer: the pieces, into memory that is there
// already (counter of_floor: the floor's time, measured in the same process, over the call's). What it must
// not be is anything that grows with elements or ranks beyond the pieces asked for.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "core/clock.h"
#include "partition/flat_layout.h"

namespace {

using namespace tranche;
using detail::FlatLayout;
using detail::TensorPiece;

/// Tensors of a GPT of `blocks` blocks, in elements: 12 a block, weights and biases in turns.
std::vector<std::int64_t> tensors_of(std::int64_t blocks) {
  constexpr std::int64_t width = 768;
  std::vector<std::int64_t> tensors{50257 * width, 1024 * width};
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (const std::int64_t inputs_times_outputs :
         {width, width, 3 * width * width, 3 * width, width * width, width, width, width, 4 * width * width,
          4 * width, 4 * width * width, width}) {
      tensors.push_back(inputs_times_outputs);
    }
  }
  return tensors;
}

/// Seconds of writing `pieces` answers.
template <class Piece>
double seconds_of_writing(std::size_t pieces) {
  std::vector<Piece> answer(pieces);
  const int repeats = static_cast<int>(2'000'000 / (pieces + 1)) + 1;
  const detail::Stopwatch watch;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (std::size_t i = 0; i < pieces; ++i) answer[i] = Piece{repeat, static_cast<std::int64_t>(i), 0, 1};
    benchmark::DoNotOptimize(answer.data());
    benchmark::ClobberMemory();
  }
  return watch.seconds() / repeats;
}

template <class Piece>
void report(benchmark::State& state, std::size_t pieces) {
  const auto calls = static_cast<double>(state.iterations());
  state.counters["pieces"] = static_cast<double>(pieces);
  state.counters["pieces/s"] =
      benchmark::Counter(static_cast<double>(pieces) * calls, benchmark::Counter::kIsRate);
  state.counters["of_floor"] =
      benchmark::Counter(seconds_of_writing<Piece>(pieces) * calls, benchmark::Counter::kIsRate);
}

void layout(benchmark::State& state) {
  const auto tensors = tensors_of(state.range(0));
  for (auto _ : state) {
    const FlatLayout made(tensors, static_cast<int>(state.range(1)));
    benchmark::DoNotOptimize(made.shard_elements());
  }
  report<TensorPiece>(state, tensors.size());
}

void shard_pieces(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(1));
  const FlatLayout flat(tensors_of(state.range(0)), ranks);
  std::size_t pieces = 0;
  for (auto _ : state) {
    const auto answer = flat.shard_pieces(ranks / 2);
    pieces = answer.size();
    benchmark::DoNotOptimize(answer.data());
  }
  report<TensorPiece>(state, pieces);
}

void locate(benchmark::State& state) {
  const FlatLayout flat(tensors_of(state.range(0)), static_cast<int>(state.range(1)));
  std::int64_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(flat.locate(at));
    at = (at + 7'777'777) % flat.padded_elements();
  }
  report<TensorPiece>(state, 1);
}

/// The part of a checkpoint of twice as many ranks and one that one rank reads.
void reshard(benchmark::State& state) {
  const auto tensors = tensors_of(state.range(0));
  const int ranks = static_cast<int>(state.range(1));
  const FlatLayout from(tensors, 2 * ranks + 1), to(tensors, ranks);
  std::size_t pieces = 0;
  for (auto _ : state) {
    const auto answer = detail::overlaps(from, to, ranks / 2);
    pieces = answer.size();
    benchmark::DoNotOptimize(answer.data());
  }
  report<detail::OverlapPiece>(state, pieces);
}

void buckets(benchmark::State& state) {
  const FlatLayout flat(tensors_of(state.range(0)), static_cast<int>(state.range(1)));
  std::size_t pieces = 0;
  for (auto _ : state) {
    const auto answer = detail::bucket_ranges(flat, 8 << 20);
    pieces = answer.size();
    benchmark::DoNotOptimize(answer.data());
  }
  report<TensorPiece>(state, pieces);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"blocks", "ranks"})->Args({12, 8})->Args({96, 64})->Args({96, 65536});
}

BENCHMARK(layout)->Apply(sizes);
BENCHMARK(shard_pieces)->Apply(sizes);
BENCHMARK(locate)->Apply(sizes);
BENCHMARK(reshard)->Apply(sizes);
BENCHMARK(buckets)->Apply(sizes);

}  // namespace
