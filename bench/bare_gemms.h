#pragma once
/// The GEMMs of a step without anything else: a lower bound of its time.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/figures.h"
#include "kernels/matmul_log.h"

namespace tranche::bench {

/// One way to compute a GEMM on its own operands. They are random numbers in the layout that suits the way
/// best; run() does not include the conversion to it.
struct GemmWay {
  std::string_view name;
  std::function<void()> run;
};

/// The ways of this build to compute the GEMM on `threads` threads: "ours" (kernels::matmul as the step calls
/// it); with oneDNN "onednn" (operands as stored), "onednn packed" (b converted beforehand to oneDNN's
/// layout) and "onednn packed both"; for fp32 also "onednn sgemm", and with OpenBLAS "openblas". All share
/// one set of operands.
std::vector<GemmWay> ways_of(const kernels::Gemm& gemm, int threads);

/// A step's list of GEMMs: each distinct one with its number of occurrences.
class BareGemms {
 public:
  BareGemms(const std::vector<kernels::Gemm>& list, int threads);

  /// Runs every distinct GEMM once in every way and records the times.
  void round();

  struct Line {
    kernels::Gemm gemm;
    std::int64_t count = 0;
    std::string best_by_processor;
    double operations = 0;  ///< of one GEMM
    Seconds best, ours;     ///< seconds of one GEMM, medians over rounds; best: those of the fastest way
  };
  std::vector<Line> lines() const;
  /// Seconds of the whole list in round `round`: each GEMM `count` times, in our way, or in its best way (by
  /// the median of the clock over all rounds).
  Seconds list_seconds(std::size_t round, bool ours) const;
  double operations() const;
  std::size_t rounds() const { return rounds_; }

 private:
  struct Way {
    GemmWay way;
    std::vector<Seconds> times;
  };
  struct Entry {
    kernels::Gemm gemm;
    std::int64_t count = 0;
    std::vector<Way> ways;
  };
  std::vector<Entry> entries_;
  std::size_t rounds_ = 0;
};

}  // namespace tranche::bench
