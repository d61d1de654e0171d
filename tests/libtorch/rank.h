#pragma once
/// A rank that trains one of the networks, under mpirun.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "networks.h"
#include "tests/comm/mpi_folder.h"
#include "trial.h"

namespace tranche::test {

using Factory = CommunicatorFactory;

inline std::string text_of(const kernels::Digest& digest) {
  return std::to_string(digest.lanes[0]) + " " + std::to_string(digest.lanes[1]);
}

inline Factory all_ranks() {
  return [](const CommunicatorOptions& options) { return make_mpi_communicator(options); };
}
/// The group of the first `ranks` ranks, which create a runtime with it.
inline Factory group_of(std::unique_ptr<Communicator>& group) {
  return [&](const CommunicatorOptions&) { return std::move(group); };
}

template <class Net>
struct Rank {
  Trial run;
  Config config;
  Runtime runtime;
  Net net;
  lt::Trainer trainer;

  Rank(const Trial& r, const Factory& factory, int ranks, Net made, std::vector<std::string> recompute = {})
      : run(r),
        config(parse_config(r.json(), ranks)),
        runtime(RuntimeOptions::from(config), factory),
        net(std::move(made)),
        trainer(runtime, *net,
                {.tokens_per_sample = 15,
                 .recompute =
                     r.recompute && recompute.empty() ? std::vector<std::string>{"*"} : std::move(recompute),
                 .matrices = r.matrices,
                 .config = config}) {}

  StepResult step(std::int64_t index) {
    return trainer.step(
        [&](int m) { return loss_of(net, first_sample(index, m, run, runtime.rank(), runtime.size()), 2); });
  }
  double evaluate() {
    return trainer
        .evaluate(2, [&](int m) { return loss_of(net, 1000 + 2 * (m * runtime.size() + runtime.rank()), 2); })
        .loss;
  }
};

template <class Net>
Net seeded(double dropout = 0) {
  torch::manual_seed(5);
  return Net(dropout);
}

template <class Net>
std::string digest_after(const Trial& run, int steps, double dropout,
                         std::vector<std::string> recompute = {}) {
  Rank<Net> rank(run, all_ranks(), world().size(), seeded<Net>(dropout), std::move(recompute));
  torch::manual_seed(100 +
                     static_cast<std::uint64_t>(rank.runtime.rank()));  // each rank drops other elements
  double loss = 0;
  for (int step = 0; step < steps; ++step) loss = rank.step(step).loss;
  return text_of(rank.trainer.engine().state_digest()) + " loss " + std::to_string(loss) + " held-out " +
         std::to_string(rank.evaluate());
}

}  // namespace tranche::test
