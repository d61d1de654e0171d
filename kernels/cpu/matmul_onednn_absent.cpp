#include "kernels/cpu/matmul_onednn.h"

namespace tranche::kernels::cpu {

bool onednn_matmul(const MatmulCall&) {
  return false;
}
bool onednn_bf16_is_fast() {
  return false;
}
bool onednn_has_sgemm() {
  return false;
}
bool onednn_has_wide_sgemm() {
  return false;
}
void onednn_sgemm(const SgemmArguments&) {}
std::string_view onednn_bf16_path() {
  return {};
}
std::string onednn_library() {
  return {};
}

}  // namespace tranche::kernels::cpu
