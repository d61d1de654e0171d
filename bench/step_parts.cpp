#include "bench/step_parts.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "bench/figures.h"
#include "tranche/core/error.h"

namespace tranche::bench {

std::string part_of_step(std::string_view span) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 34> parts{{
      {"matmul", "matmul"},
      {"matmul_bias", "matmul, bias"},
      {"matmul_bias_gelu", "matmul, bias, gelu"},
      {"matmul_gelu_backward", "matmul, gelu backward"},
      {"attention_forward", "attention forward"},
      {"attention_backward", "attention backward"},
      {"layer_norm_forward", "layer norm forward"},
      {"residual_layer_norm_forward", "residual and layer norm forward"},
      {"layer_norm_backward", "layer norm backward"},
      {"rms_norm_forward", "RMS norm forward"},
      {"residual_rms_norm_forward", "residual and RMS norm forward"},
      {"rms_norm_backward", "RMS norm backward"},
      {"swiglu_forward", "SwiGLU forward"},
      {"swiglu_forward_backward", "SwiGLU again and backward"},
      {"rope", "rotary positions"},
      {"rope_table", "rotary positions"},
      {"gelu_forward", "gelu forward"},
      {"gelu_backward", "gelu backward"},
      {"gelu_forward_backward", "gelu again and backward"},
      {"bias_gradient", "bias gradients"},
      {"add", "residual"},
      {"dropout", "dropout"},
      {"embedding_forward", "embedding"},
      {"embedding_backward", "embedding"},
      {"cross_entropy_begin", "cross-entropy"},
      {"cross_entropy_accumulate", "cross-entropy"},
      {"cross_entropy_finish", "cross-entropy"},
      {"cross_entropy_gradient", "cross-entropy"},
      {"cast", "casts and copies"},
      {"copy", "casts and copies"},
      {"fill_zero", "clearing"},
      {"adam_update", "optimizer"},
      {"gradient_statistics", "gradient norm"},
      {"accumulate", "gradient sums"},
  }};
  for (const auto& [name, part] : parts) {
    if (name == span) return std::string(part);
  }
  return std::string(span);
}

void StepParts::add_step(const TraceRecorder& trace, std::string_view track, std::int64_t spans_before,
                         double seconds) {
  const auto recorded = nlohmann::json::parse(trace.to_json());
  std::int64_t number = 0, wanted = -1;
  for (const auto& event : recorded.at("traceEvents")) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name" && event.at("args").at("name") == track) {
      wanted = event.at("tid").get<std::int64_t>();
    }
  }
  std::map<std::string, Sum> sums;
  std::vector<std::pair<double, double>> products;  // begin and seconds
  double in_spans = 0;
  for (const auto& event : recorded.at("traceEvents")) {
    if (event.at("ph") == "M" || number++ < spans_before || event.at("ph") != "X") continue;
    if (event.at("tid").get<std::int64_t>() != wanted) continue;
    const double span = 1e-6 * event.at("dur").get<double>();
    const auto name = event.at("name").get<std::string>();
    if (name.starts_with("matmul")) products.emplace_back(event.at("ts").get<double>(), span);
    Sum& sum = sums[part_of_step(name)];
    ++sum.calls;
    sum.seconds += span;
    in_spans += span;
  }
  sums["engine and waits, between kernels"] = {1, seconds - in_spans};
  steps_.push_back(std::move(sums));
  std::stable_sort(products.begin(), products.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  products_.emplace_back();
  for (const auto& [begin, product] : products) products_.back().push_back(product);
  seconds_ += seconds;
  in_spans_ += in_spans;
}

std::vector<StepParts::Line> StepParts::lines() const {
  std::map<std::string, std::vector<double>> seconds;
  std::map<std::string, std::int64_t> calls;
  for (const auto& step : steps_) {
    for (const auto& [name, sum] : step) {
      seconds[name].push_back(sum.seconds);
      calls[name] = sum.calls;
    }
  }
  std::vector<Line> lines;
  for (const auto& [name, values] : seconds) lines.push_back({name, calls[name], median(values)});
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.seconds > b.seconds; });
  return lines;
}

std::vector<double> StepParts::products() const {
  std::vector<double> medians;
  for (std::size_t i = 0; i < products_.at(0).size(); ++i) {
    std::vector<double> seconds;
    for (const auto& step : products_) {
      if (step.size() != products_[0].size()) throw InvalidArgument("steps differ in their matrix products");
      seconds.push_back(step[i]);
    }
    medians.push_back(median(seconds));
  }
  return medians;
}

double StepParts::named_share() const {
  return seconds_ > 0 ? in_spans_ / seconds_ : 0;
}

}  // namespace tranche::bench
