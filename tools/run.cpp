#include "tranche/tools/run.h"

#include <fmt/format.h>

#include <ostream>

#include "tranche/core/error.h"
#include "tranche/tools/files.h"
#include "tranche/tools/matmul_peak.h"

namespace tranche::tools {

namespace {
constexpr double peak_seconds = 0.3;
}

int Run::prepare() {
  return launch.agree([this] {
    settings = resolve_settings(options, launch.size());
    data = open_data(options, settings);
    for (const Fault& fault : {options.fail, options.hang}) {
      if (fault.rank >= launch.size()) {
        throw ConfigurationError(
            fmt::format("there is no rank {} to fail among {}", fault.rank, launch.size()));
      }
    }
    if (speaks()) require_writable(options.report, "--report");
    if (!options.trace.empty()) {
      require_writable(path_of_rank(options.trace, launch.rank(), launch.size()), "--trace");
    }
  });
}

void Run::start() {
  RuntimeOptions runtime_options = RuntimeOptions::from(settings.config);
  runtime_options.device = options.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  runtime_options.trace = !options.trace.empty();
  runtime = std::make_unique<Runtime>(Runtime::from_environment(runtime_options));
  peak_flops = measure_matmul_peak(runtime->device(), settings.config.precision.compute, peak_seconds);
  runtime->all()
      .all_reduce(&peak_flops, 1, DataType::float64, ReduceOperation::sum,
                  {"start", "peak", Traffic::control})
      .wait();
  model = std::make_unique<models::Gpt>(settings.model);
  engine = std::make_unique<Engine>(*runtime, models::Gpt::spec(settings.model, settings.sequence),
                                    settings.config);
  feeder = std::make_unique<BatchFeeder>(*engine, settings.model, settings.batch, settings.sequence);
  if (!speaks()) return;
  report.set_start(launch.size(), settings.config.stage, engine->config().to_json(),
                   runtime->numerics_fingerprint(), options.model, options.data);
  output.out << engine->summary();
  const auto row = [this](std::string_view name, const std::string& value) {
    output.out << fmt::format("  {:<22} {}\n", name, value);
  };
  row("matmul peak", fmt::format("{:.0f} GFLOP/s measured, all ranks together", peak_flops / 1e9));
  row("data", fmt::format("{} ({}): {} windows of {} tokens to train, {} held out, {} of them evaluated",
                          options.data, name_of(data.training_file->format()), data.training->count(),
                          settings.sequence, data.validation->count(), data.evaluation.size()));
  if (data.text() && settings.model.vocabulary != 256) {
    row("note", fmt::format("text is read as bytes: {} of the model's {} tokens are used", 256,
                            settings.model.vocabulary));
  }
  output.out.flush();
}

EvaluationResult Run::validate(std::int64_t step) {
  const EvaluationResult result =
      evaluate_windows(*engine, *model, *feeder, *data.validation, data.evaluation);
  if (speaks()) report.add_validation(step, result);
  return result;
}

NgramEntropies Run::ngrams() const {
  const auto bytes = [](const TokenRange& range) {
    return range.file->bytes().subspan(static_cast<std::size_t>(range.begin),
                                       static_cast<std::size_t>(range.size));
  };
  return NgramModel(bytes(data.training_range)).entropies(bytes(data.validation_range));
}

int Run::execute(const std::function<void()>& work) {
  if (const int status = prepare(); status != 0) return status;
  try {
    start();
    work();
  } catch (...) {
    // Before anything is unwound: an Engine waits for its collectives, and peers have to know first.
    if (runtime) return launch.fail(runtime->all(), std::current_exception());
    return launch.fail(std::current_exception());
  }
  return 0;
}

}  // namespace tranche::tools
