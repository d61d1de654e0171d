#include "odd_model.h"

#include <fmt/format.h>

#include <bit>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

namespace tranche::test {

ModelSpec odd_model(bool single_unit, bool large) {
  ModelSpec spec;
  spec.add_unit({"tied",
                 {{"tied.a", Shape{7}, Initializer::normal(0.5f)},
                  {"tied.b", Shape{64, 3}, Initializer::uniform(-1, 1), {}, LinearLayout::none, false, 2}},
                 2});
  if (large) {
    spec.add_unit({"large",
                   {{"large.h", Shape{67, 83}, Initializer::normal(0.5f), {}, LinearLayout::none, false, 1},
                    {"large.i", Shape{4603}, Initializer::uniform(-1, 1)},
                    {"large.j", Shape{5}, Initializer::ones()}},
                   1});
  }
  if (single_unit || large) return spec;
  spec.add_unit(
      {"prime",
       {{"prime.c", Shape{1009}, Initializer::normal(1)}, {"prime.d", Shape{1}, Initializer::ones()}},
       1});
  spec.add_unit({"tiny", {{"tiny.e", Shape{3}, Initializer::constant(0.25f)}}, 1});
  spec.add_unit({"mixed",
                 {{"mixed.f", Shape{13, 11}, Initializer::normal(0.1f), {}, LinearLayout::none, false, 1},
                  {odd_frozen_tensor, Shape{131}, Initializer::normal(0.1f)},
                  {"mixed.g", Shape{300}, Initializer::zeros()}},
                 1});
  return spec;
}

namespace {

float load(const ConstTensorView& view, std::int64_t i) {
  switch (view.dtype) {
    case DataType::bfloat16:
      return to_float(view.as<bfloat16>()[i]);
    case DataType::float16:
      return to_float(view.as<float16>()[i]);
    default:
      return view.as<float>()[i];
  }
}

/// Runs `work` on the host on the contents of `read` and `changed`, in stream order: directly if host code
/// may access device memory, else on copies.
void host_work(
    Engine& engine, const char* name, const std::vector<ConstTensorView>& read,
    const std::vector<TensorView>& changed,
    const std::function<void(const std::vector<ConstTensorView>&, const std::vector<TensorView>&)>& work) {
  Device& device = engine.device();
  Stream& stream = engine.compute_stream();
  if (device.host_accessible() || device.kind() == DeviceKind::meta) {
    stream.enqueue(name, [=] { work(read, changed); });
    return;
  }
  std::vector<std::vector<std::byte>> copies;
  const auto fetch = [&](auto view) {
    copies.emplace_back(static_cast<std::size_t>(view.bytes()));
    device.copy_to_host(stream, copies.back().data(), view.data, view.bytes());
    view.data = copies.back().data();
    return view;
  };
  std::vector<ConstTensorView> host_read;
  std::vector<TensorView> host_changed;
  for (const ConstTensorView& view : read) host_read.push_back(fetch(view));
  for (const TensorView& view : changed) host_changed.push_back(fetch(view));
  stream.synchronize();
  work(host_read, host_changed);
  for (std::size_t i = 0; i < changed.size(); ++i) {
    device.copy_from_host(stream, changed[i].data, host_changed[i].data, changed[i].bytes());
  }
}

}  // namespace

OddMicroBatch::OddMicroBatch(Engine& engine, std::int64_t first_sample, std::int64_t count)
    : engine_(engine),
      first_(first_sample),
      count_(count),
      scalars_(engine.acquire(16, Category::activations, "odd scalars")),
      loss_{scalars_.data(), DataType::float64, Shape{1}},
      tokens_{static_cast<std::byte*>(scalars_.data()) + 8, DataType::int64, Shape{1}} {
  const std::int64_t scalars[2] = {std::bit_cast<std::int64_t>(0.0), count};
  engine.device().copy_from_host(engine.compute_stream(), scalars_.data(), scalars, sizeof(scalars));
}

void OddMicroBatch::forward(int unit) {
  const GatheredUnit weights = engine_.gather({unit});
  const auto tensors = engine_.model().unit({unit}).tensors.size();
  for (std::size_t t = 0; t < tensors; ++t) {
    const ConstTensorView w = weights.tensor(static_cast<int>(t));
    host_work(engine_, "loss", {w}, {loss_},
              [first = first_, count = count_, tensor = static_cast<std::size_t>(unit) * 16 + t](
                  const auto& read, const auto& changed) {
                // The sums are local variables, because sanitizers check every access to memory.
                double sum = *changed[0].template as<double>();
                for (std::int64_t i = 0; i < read[0].elements(); ++i) {
                  const float weight = load(read[0], i);
                  for (std::int64_t s = first; s < first + count; ++s) {
                    const double d = static_cast<double>(weight) - odd_target(tensor, s, i);
                    sum += 0.5 * d * d;
                  }
                }
                *changed[0].template as<double>() = sum;
              });
  }
}

void OddMicroBatch::backward(int unit, float share, const std::string& bad_tensor) {
  const float scale = engine_.loss_gradient_scale();
  const GatheredUnit weights = engine_.gather({unit});
  UnitGradients gradients = engine_.gradients({unit});
  const UnitSpec& spec = engine_.model().unit({unit});
  for (std::size_t t = 0; t < spec.tensors.size(); ++t) {
    const ConstTensorView w = weights.tensor(static_cast<int>(t));
    const TensorView g = gradients.tensor(static_cast<int>(t));
    const bool bad = spec.tensors[t].name == bad_tensor;
    host_work(engine_, "gradient", {w}, {g},
              [=, first = first_, count = count_, tensor = static_cast<std::size_t>(unit) * 16 + t](
                  const auto& read, const auto& changed) {
                auto* gradient = changed[0].template as<float>();
                for (std::int64_t i = 0; i < read[0].elements(); ++i) {
                  const float weight = load(read[0], i);
                  float sum = gradient[i];
                  for (std::int64_t s = first; s < first + count; ++s) {
                    sum += share * scale * (weight - odd_target(tensor, s, i));
                  }
                  gradient[i] = sum;
                }
                if (bad) gradient[2] = std::numeric_limits<float>::infinity();
              });
  }
  std::move(gradients).reduce();
}

void OddMicroBatch::end() {
  engine_.end_micro_batch(loss_, tokens_);
}

void odd_micro_batch(Engine& engine, std::int64_t first_sample, std::int64_t count,
                     const std::string& poison_tensor, bool reversed) {
  engine.begin_micro_batch();
  OddMicroBatch micro_batch(engine, first_sample, count);
  const auto units = static_cast<int>(engine.model().units().size());
  // The loss in forward order, then the gradients in backward order, as in a network.
  for (int place = 0; place < units; ++place) micro_batch.forward(reversed ? units - 1 - place : place);
  micro_batch.backward(0, 0.5f,
                       poison_tensor);  // the tied unit's first use in backward, like a tied head's
  for (int place = 1; place < units; ++place) {
    micro_batch.backward(reversed ? place : units - place, 1.0f, poison_tensor);
  }
  micro_batch.backward(0, 0.5f, poison_tensor);
  micro_batch.end();
}

std::string OddRun::to_string() const {
  return fmt::format(
      "OddRun{{ranks={}, stage={}, accumulation={}, dtype={}, policy={}, reduction_group={}, optimizer={}, "
      "overlap={}, "
      "reduce_bucket={}, gather_bucket={}, depth={}, gather_for={}, persistent={} of {}, prefetch={}, "
      "poison={}, plan_memory={}, frozen={}, steps={}, "
      "clipping={}, also_frozen={}, single_unit={}, large={}, moments={}, master={}{}, "
      "accumulation_dtype={}, samples={}, delay={}, seed={}, offload_optimizer={}, offload_param={}, "
      "ratio={}, "
      "tile={}, buffers={}, io={}, ranks_per_host={}, mesh=\"{}\", replicate={}, "
      "replica_sum={}, collectives={}, device_transport={}, copy_in={}, micro_batches={}, quantized={}{}}}",
      ranks, stage, accumulation, name_of(dtype), name_of(policy), reduction_group, optimizer, overlap,
      reduce_bucket, gather_bucket, depth, name_of(gather_for), persistent, persistent_in_all, prefetch,
      poison, plan_memory, frozen, steps, clipping, also_frozen, single_unit, large, name_of(moments),
      name_of(master), stochastic_rounding ? " at random" : "", name_of(accumulation_dtype),
      samples_per_micro_batch, faults.maximum_delay_seconds, faults.seed, name_of(offload.optimizer),
      name_of(offload.parameters), offload.ratio, offload.tile_elements, offload.tile_buffers,
      offload.io_engine, ranks_per_host, mesh, name_of(replicate), name_of(replica_sum), collectives,
      device_transport, faults.copy_in, micro_batches, quantized_gradients ? "gradients" : "",
      quantized_weights ? " weights" : "");
}

void apply_setting_without_effect(OddRun& run, int which) {
  run.offload.tile_elements = 4096;
  run.offload.nvme_path = std::filesystem::temp_directory_path().string();
  switch (which % settings_without_effect) {
    case 1:
      run.reduce_bucket = run.gather_bucket = 700;
      break;
    case 2:
      run.collectives = "shared";
      run.overlap = false;
      break;
    case 3:
      run.ranks_per_host = 2;
      run.collectives = "messages";
      break;
    case 4:
      run.ranks_per_host = 3;
      run.collectives = "shared";
      run.gather_for = GatherFor::step;
      break;
    case 5:
      run.offload.optimizer = OffloadTier::cpu;
      if (run.stage == 3) run.offload.parameters = OffloadTier::cpu;
      break;
    case 6:
      run.offload.optimizer = OffloadTier::nvme;
      if (run.stage == 3) run.offload.parameters = OffloadTier::nvme;
      break;
    case 7:
      run.depth = 4;
      run.reduce_bucket = 1;  // one block of each rank at a time
      run.faults = {0.0003, 5};
      break;
    case 8:
      run.persistent = 200;
      run.poison = true;
      break;
    case 9:
      run.plan_memory = false;
      run.faults = {0.0003, 6};
      run.poison = true;
      break;
    case 10:
      run.offload.optimizer = OffloadTier::cpu;
      run.offload.ratio = 0.5;
      break;
    case 11:
      if (run.stage == 3) run.offload.parameters = OffloadTier::cpu;
      run.depth = 1;
      break;
    default:
      run.poison = true;
  }
}

Config odd_config(const OddRun& run) {
  Config config;
  config.micro_batch_size = run.samples_per_micro_batch;
  config.accumulation_steps = run.accumulation;
  config.train_batch_size = run.samples_per_micro_batch * run.accumulation * run.ranks;
  if (run.micro_batches > 0) {
    config.world_size_invariant = true;
    config.accumulation_steps = 0;
    config.train_batch_size = run.samples_per_micro_batch * run.micro_batches;
  }
  config.stage = run.stage;
  config.reduction = run.policy;
  config.reduction_group = run.reduction_group;
  config.overlap = run.overlap;
  config.reduce_bucket_elements = run.reduce_bucket;
  config.allgather_bucket_elements = run.gather_bucket;
  config.depth = run.depth;
  config.gather_for = run.gather_for;
  config.persistent_tensor_elements = run.persistent;
  config.persistent_model_elements = run.persistent_in_all;
  config.prefetch_elements = run.prefetch;
  config.precision.compute = run.dtype;
  config.precision.communication = run.communication.value_or(run.dtype);
  config.quantized_gradients = run.quantized_gradients;
  config.quantized_weights = run.quantized_weights;
  config.precision.accumulation = run.accumulation_dtype;
  config.loss_scaling = run.dtype == DataType::float16;
  config.loss_scaler.initial_scale = 1024;
  config.gradient_clipping = run.clipping;
  config.optimizer.type = run.optimizer;
  config.optimizer.learning_rate = 0.05;
  config.optimizer.parameters = run.parameters;
  if (run.optimizer == "SGD") config.optimizer.parameters["momentum"] = 0.9;
  config.precision.moments = run.moments;
  config.precision.master = run.master;
  config.precision.stochastic_rounding = run.stochastic_rounding;
  if (run.frozen && !run.large) config.frozen = {"mixed.froz*"};
  if (!run.also_frozen.empty()) config.frozen.push_back(run.also_frozen);
  config.workspace_bytes = 64 << 10;  // no kernel of this model needs more, and poison fills all of it
  config.staging_bytes = 64 << 10;
  config.communication_timeout = 60;
  config.threads = 1;
  config.debug.poison_memory = run.poison;
  config.debug.plan_memory = run.plan_memory;
  config.debug.ranks_per_host = run.ranks_per_host;
  config.mesh = run.mesh;
  config.replicate = run.replicate;
  config.replica_sum = run.replica_sum;
  config.update = run.update;
  config.collectives = run.collectives;
  config.device_transport = run.device_transport;
  config.offload = run.offload;
  config.debug.host_link_bytes_per_second = run.link_bytes_per_second;
  return config;
}

OddResult::OddResult(int ranks)
    : accounts(static_cast<std::size_t>(ranks)),
      host_accounts(static_cast<std::size_t>(ranks)),
      nvme_accounts(static_cast<std::size_t>(ranks)),
      state_bytes(static_cast<std::size_t>(ranks)),
      wire_elements(static_cast<std::size_t>(ranks)),
      formula_elements(static_cast<std::size_t>(ranks)),
      wire_bytes(static_cast<std::size_t>(ranks)),
      formula_bytes(static_cast<std::size_t>(ranks)),
      memory_calls_per_late_step(static_cast<std::size_t>(ranks)) {}

void train_odd_rank(const OddRun& run, int rank, const CommunicatorFactory& factory, OddResult& result,
                    std::mutex& mutex) {
  const Config config = odd_config(run);
  RuntimeOptions options = RuntimeOptions::from(config);
  options.device = run.device;
  options.log_level = LogLevel::off;
  Runtime runtime(options, factory);
  Engine engine(runtime, odd_model(run.single_unit, run.large), config);
  std::vector<StepResult> steps;
  std::int64_t late_calls = 0;
  for (int step = 0; step < run.steps; ++step) {
    const std::int64_t before = runtime.memory_calls();
    const std::int64_t rounds = engine.config().accumulation_steps;
    for (std::int64_t m = 0; m < rounds; ++m) {
      // The global batch is divided by (micro-batch, rank). The last block is one sample shorter, so that
      // ranks have different numbers of tokens.
      std::int64_t block = (step * rounds + m) * run.ranks + rank;
      bool is_short = rank == run.ranks - 1 && run.ranks > 1, without_samples = false;
      if (run.micro_batches > 0) {
        block = step * run.micro_batches + m * run.ranks + rank;
        is_short = block % 5 == 2;
        without_samples = m * run.ranks + rank >= run.micro_batches;
      }
      is_short = is_short && !run.whole_samples;
      odd_micro_batch(engine, block * run.samples_per_micro_batch,
                      run.samples_per_micro_batch - (is_short ? 1 : 0), without_samples ? "prime.c" : "");
    }
    steps.push_back(engine.step());
    if (step >= 2) late_calls += runtime.memory_calls() - before;
  }
  // The text {"all_gather":{"calls":..,"elements":E,"bytes":B},"reduce_scatter":{..},"control":..}, of which
  // the data counts.
  const auto of_data = [text = engine.traffic_report()](const std::string& key) {
    std::int64_t sum = 0;
    const auto control = text.find("\"control\"");
    for (std::size_t at = text.find(key); at < control; at = text.find(key, at + 1)) {
      sum += std::stoll(text.substr(at + key.size()));
    }
    return sum;
  };
  const TierAccount account = runtime.ledger().account(Tier::device);
  const TierAccount host_account = runtime.ledger().account(Tier::host);
  const TierAccount nvme_account = runtime.ledger().account(Tier::nvme);
  if (run.at_end) run.at_end(engine, rank);
  const kernels::Digest weights = engine.weights_digest();
  const kernels::Digest state = engine.state_digest();
  const std::lock_guard lock(mutex);
  const auto r = static_cast<std::size_t>(rank);
  result.accounts[r] = account;
  result.host_accounts[r] = host_account;
  result.nvme_accounts[r] = nvme_account;
  result.state_bytes[r] = engine.state_bytes();
  result.wire_elements[r] = of_data("\"elements\":");
  result.formula_elements[r] = engine.formula_traffic_elements();
  result.wire_bytes[r] = of_data("\"bytes\":");
  result.formula_bytes[r] = engine.formula_traffic_bytes();
  result.memory_calls_per_late_step[r] = late_calls;
  if (rank == 0) {
    result.weights = weights;
    result.state = state;
    result.steps = std::move(steps);
  }
}

OddResult train_odd(const OddRun& run) {
  OddResult result(run.ranks);
  std::mutex mutex;
  if (run.device == DeviceKind::meta) {
    train_odd_rank(
        run, 0,
        [&](const CommunicatorOptions& options) {
          return make_meta_communicator(0, run.ranks, run.ranks, options);
        },
        result, mutex);
  } else {
    run_thread_ranks(
        run.ranks,
        [&](int rank, const CommunicatorFactory& factory) {
          train_odd_rank(run, rank, factory, result, mutex);
        },
        run.faults);
  }
  return result;
}

}  // namespace tranche::test
