#pragma once
/// The GEMMs of a step, run alone: a lower bound of its time.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/figures.h"
#include "kernels/matmul_log.h"

namespace tranche::bench {

/// One way to compute a GEMM on its own operands: random numbers, in the layout that the way likes best;
/// the time to bring them there is not part of run().
struct GemmWay {
  std::string_view name;
  std::function<void()> run;
};

/// Ways that this build knows for the GEMM on `threads` threads: "ours" (kernels::matmul as the step calls
/// it), and, where oneDNN and OpenBLAS are, "onednn" (as stored), "onednn packed" (b laid out beforehand as
/// oneDNN wants it), "onednn packed both", for fp32 also "onednn sgemm" and "openblas". All share one set of
/// operands.
std::vector<GemmWay> ways_of(const kernels::Gemm& gemm, int threads);

/// A step's list of GEMMs, each distinct one with how often it stands there.
class BareGemms {
 public:
  BareGemms(const std::vector<kernels::Gemm>& list, int threads);

  /// Runs every distinct GEMM once in every way, keeping times.
  void round();

  struct Line {
    kernels::Gemm gemm;
    std::int64_t count = 0;
    std::string best_by_processor;
    double operations = 0;  ///< of one
    Seconds best, ours;     ///< seconds of one: medians over rounds; best: the fastest way's
  };
  std::vector<Line> lines() const;
  /// Seconds of the whole list in round `round`: each GEMM `count` times, in its best way (by the median
  /// of the clock over all rounds), or in ours.
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
