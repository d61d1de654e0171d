// checkpoint_sample FOLDER STEP [hybrid|boxed]: writes a checkpoint to FOLDER/run and its exports to
// FOLDER/fp32 and FOLDER/bf16. The checkpoint is of three ranks, of two replicas of two, or of four ranks
// whose tensors are cut into boxes.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "checkpoint/safetensors.h"
#include "sample.h"

int main(int count, char** arguments) {
  using namespace tranche;
  const std::string kind = count == 4 ? arguments[3] : "";
  if (count < 3 || count > 4 || (count == 4 && kind != "hybrid" && kind != "boxed")) {
    std::fputs("usage: checkpoint_sample FOLDER STEP [hybrid|boxed]\n", stderr);
    return 2;
  }
  try {
    const std::string folder = arguments[1];
    const testing::TestStorage storage(detail::posix_file_system());
    const checkpoint::Layout layout = kind == "boxed"    ? testing::boxed_layout()
                                      : kind == "hybrid" ? testing::sample_layout("replicate=2, shard=2", 4)
                                                         : testing::sample_layout(3);
    const std::string path = testing::save_sample(storage, folder + "/run", layout, std::atoll(arguments[2]));
    checkpoint::Reader reader(storage, path);
    checkpoint::ExportOptions options;
    options.config_json = "{\"model_type\": \"gpt2\"}\n";
    checkpoint::export_safetensors(reader, storage, folder + "/fp32", options);
    options.dtype = DataType::bfloat16;
    options.largest_file = 3000;
    checkpoint::export_safetensors(reader, storage, folder + "/bf16", options);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
  return 0;
}
