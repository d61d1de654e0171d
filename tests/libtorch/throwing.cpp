/// libtorch_throwing WHERE CAUGHT: a run of the adapter in which rank 1 throws in its second step.
///   WHERE   forward: in a unit; hook: in an autograd hook on a gradient; backward: in a node;
///           recomputation: in a unit that backward runs again; memory: a torch operator in backward requests
///           more than the limit, on any number of ranks
///   CAUGHT  inside the trainer's lifetime, outside of it (while the runtime exists), or both
/// Prints the lines that tests/engine/check_throwing.py reads.

#include <chrono>
#include <cstdio>
#include <stdexcept>

#include "networks.h"
#include "tests/comm/errors_of_ranks.h"

namespace tranche::test {
namespace {

struct Way {
  std::string where, caught;
  bool now = false;  ///< true on rank 1 in its second step
};

void throw_now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  std::printf("threw at %.3f\n", std::chrono::duration<double>(time).count());
  std::fflush(stdout);
  throw std::runtime_error("file 7 of rank 1 has no tokens");
}

/// Requests more memory than the limit from torch in backward.
struct Hungry : torch::autograd::Function<Hungry> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * torch::ones({std::int64_t{1} << 26}).sum()};
  }
};

struct Throwing : torch::autograd::Function<Throwing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw_now();
    return {};
  }
};

struct StageImpl : torch::nn::Module {
  StageImpl() : linear(register_module("linear", torch::nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& x, const Way& way) {
    const at::Tensor y = linear(x);
    if (!way.now) return torch::tanh(y);
    if (way.where == "forward") throw_now();
    if (way.where == "recomputation" && at::GradMode::is_enabled()) throw_now();
    if (way.where == "backward") return Throwing::apply(y);
    if (way.where == "memory") return Hungry::apply(y);
    if (way.where == "hook" && y.requires_grad()) y.register_hook([](const at::Tensor&) { throw_now(); });
    return torch::tanh(y);
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Stage);

struct NetImpl : torch::nn::Module {
  lt::Units<Stage> stages{this, "stages", 4};
};

void train(lt::Trainer& trainer, NetImpl& net, Way& way) {
  for (int step = 0; step < 4; ++step) {
    trainer.step([&](int) {
      at::Tensor x = torch::ones({2, 16});
      for (std::size_t i = 0; i < net.stages.size(); ++i) {
        way.now =
            i == 2 && step == 1 && trainer.engine().runtime().rank() == trainer.engine().runtime().size() / 2;
        x = net.stages[i](x, way);
      }
      return lt::Loss{x.sum(), 2};
    });
  }
}

int run(Runtime& runtime, Way& way) {
  torch::manual_seed(1);
  NetImpl net;
  lt::TrainerOptions options;
  if (way.where == "recomputation") options.recompute = {"*"};
  if (way.caught == "outside") {
    try {
      lt::Trainer trainer(runtime, net, std::move(options));
      train(trainer, net, way);
    } catch (...) {
      return runtime.fail(std::current_exception());
    }
    return 0;
  }
  lt::Trainer trainer(runtime, net, std::move(options));
  try {
    train(trainer, net, way);
  } catch (...) {
    const int status = trainer.engine().fail(std::current_exception());
    return way.caught == "both" ? runtime.fail(std::current_exception()) : status;
  }
  return 0;
}

}  // namespace
}  // namespace tranche::test

int main(int argc, char** argv) {
  using namespace tranche;
  if (argc != 3) return 64;
  test::Way way{argv[1], argv[2]};
  Runtime runtime;
  int status = 0;
  try {
    runtime = Runtime::from_config(
        R"({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "optimizer": {"type": "SGD"},
        "zero_optimization": {"stage": 3}, "tranche": {"communication_timeout": 60, "threads": 1, "device_memory": "64MiB"}})");
    const auto account = libtorch::account_memory(runtime);
    status = test::run(runtime, way);
  } catch (...) {
    status = runtime.fail(std::current_exception());
  }
  std::printf("rank %d ends with %d\n", runtime.rank(), status);
  std::fflush(stdout);
  test::await_errors_of_ranks(runtime.rank(), runtime.size());
  return status;
}
