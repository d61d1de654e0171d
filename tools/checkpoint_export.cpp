// tranche checkpoint export.

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <ostream>

#include "checkpoint/safetensors.h"
#include "tools/checkpoint_command.h"
#include "tools/checkpoint_source.h"
#include "tools/terminal.h"
#include "tools/transfer_progress.h"

namespace tranche::tools {

namespace {

/// The model's config.json with what transformers should know besides.
std::string config_text(const models::LanguageModel& model, DataType dtype) {
  auto json = nlohmann::json::parse(model.to_json());
  json["torch_dtype"] = dtype == DataType::float32 ? "float32" : "bfloat16";
  return json.dump(2) + "\n";
}

}  // namespace

int checkpoint_export(const CheckpointOptions& options, const Output& output) {
  const checkpoint::LocalStorage local;
  checkpoint::Reader reader(local, chosen_checkpoint(detail::posix_file_system(), options.path, output));
  const std::shared_ptr<const models::LanguageModel> model =
      identity_of(reader.manifest(), reader.folder(), options.model, options.models).model;
  require_tensors(*model, options.model.empty() ? "its own 'user'" : "--model " + options.model, reader);
  checkpoint::ExportOptions how;
  how.dtype = options.dtype == "bf16" ? DataType::bfloat16 : DataType::float32;
  how.config_json = config_text(*model, how.dtype);
  TransferProgress progress("exported",
                            model->spec(model->shape().positions).parameters() * size_of(how.dtype),
                            output.terminal, [&](std::string_view text) { draw(output.out, text); });
  how.progress = [&](std::int64_t bytes) { progress.add(bytes); };
  const checkpoint::ExportSummary written = checkpoint::export_safetensors(reader, local, options.to, how);
  progress.finish();
  output.out << fmt::format("{}: {} tensors of step {} in {} ({})\n", options.to, written.tensors,
                            reader.manifest().run.step, options.dtype, progress.summary());
  return 0;
}

}  // namespace tranche::tools
