// Changes the batch between steps, and everything in the engine that depends on it.

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "engine/engine_impl.h"
#include "engine/pipeline_order.h"

namespace tranche {

using namespace detail;

int Engine::Impl::loss_exponent() const {
  const double nominal =
      static_cast<double>(config.train_batch_size) * static_cast<double>(model.tokens_per_sample);
  return static_cast<int>(std::lround(std::log2(std::max(nominal, 1.0))));
}

void Engine::Impl::allocate_scalars() {
  scalars = {};
  scalars = StepScalars(runtime.memory(Tier::device), config.accumulation_steps, store.trainable().size(),
                        config.gradient_noise_scale ? config.accumulation_steps : 0);
}

void Engine::Impl::set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps) {
  require(!sequence.in_step() && !sequence.in_evaluation(),
          "set_batch() inside a step or an evaluation; call it between step() and the next micro-batch");
  require(!config.world_size_invariant,
          "set_batch() with tranche.world_size_invariant, where train_batch_size and "
          "train_micro_batch_size_per_gpu stay as they are");
  struct Batch {
    std::int64_t size, steps;
    bool operator==(const Batch&) const = default;
    std::string text() const { return std::to_string(steps) + " x " + std::to_string(size) + " samples"; }
  };
  const int data_ranks = runtime.mesh().data_ranks();
  const Batch mine{micro_batch_size, accumulation_steps};
  std::vector<Batch> batches(static_cast<std::size_t>(world.size()), mine);
  world
      .all_gather(&mine, batches.data(), sizeof(Batch), DataType::uint8, 0, {},
                  OperationLabel{"batch", "agree", Traffic::control, Tier::host})
      .wait();
  for (std::size_t r = 1; r < batches.size(); ++r) {
    if (batches[r] == batches[0]) continue;
    throw InvalidArgument("set_batch(): " + runtime.mesh().name_of_rank(static_cast<int>(r)) + " asks for " +
                          batches[r].text() + " a step, rank 0 for " + batches[0].text() +
                          "; nothing has changed");
  }
  if (micro_batch_size < 1 || accumulation_steps < 1) {
    throw InvalidArgument("set_batch() to " + mine.text() + " a step; both must be at least 1");
  }
  if (config.gradient_noise_scale && accumulation_steps * data_ranks < 2) {
    throw InvalidArgument(
        "set_batch() to " + mine.text() +
        " a step on one rank: tranche.gradient_noise_scale needs at least two micro-batches");
  }
  if (micro_batch_size == config.micro_batch_size && accumulation_steps == config.accumulation_steps) return;
  std::shared_ptr<const pipeline::PipelineSchedule> schedule;
  if (stages.count > 1) {
    Config other = config;
    other.accumulation_steps = accumulation_steps;
    try {
      schedule = schedule_of(other, stages);
    } catch (const ConfigurationError& error) {
      throw InvalidArgument("set_batch() to " + mine.text() + " a step: " + error.message());
    }
  }
  recorder.forget_passes();  // throws while memory of a pass is held, before anything has changed
  stages.schedule = std::move(schedule);
  step_schedule = nullptr;
  config.micro_batch_size = micro_batch_size;
  config.accumulation_steps = accumulation_steps;
  config.train_batch_size = micro_batch_size * accumulation_steps * data_ranks;
  traffic.set_gathered(0, 0);
  compute.synchronize();
  on_all([this] {
    allocate_scalars();
    for (FlatBuffer* flat : store.trainable()) {
      // With one micro-batch a step the main gradient uses memory of the step; with several it is persistent.
      if (store.residency().transient_gradients(*flat)) {
        flat->gradients = {};
      } else {
        store.allocate_gradients(*flat);
      }
    }
  });
}

void Engine::set_batch(std::int64_t micro_batch_size, std::int64_t accumulation_steps) {
  impl_->guarded([&] { impl_->set_batch(micro_batch_size, accumulation_steps); });
}

}  // namespace tranche
