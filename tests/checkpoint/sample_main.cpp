// checkpoint_sample FOLDER STEP: a checkpoint of three ranks in FOLDER/run and its exports in FOLDER/fp32 and
// FOLDER/bf16.

#include <cstdio>
#include <cstdlib>

#include "checkpoint/safetensors.h"
#include "sample.h"

int main(int count, char** arguments) {
  using namespace tranche;
  if (count != 3) {
    std::fputs("usage: checkpoint_sample FOLDER STEP\n", stderr);
    return 2;
  }
  try {
    const std::string folder = arguments[1];
    const testing::TestStorage storage(detail::posix_file_system());
    const std::string path =
        testing::save_sample(storage, folder + "/run", testing::sample_layout(3), std::atoll(arguments[2]));
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
