#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cpp"
#include <hwy/foreach_target.h>
// Must follow foreach_target.h.
#include "kernels/cpu/convert.h"
#include "kernels/cpu/row-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tranche::kernels::cpu::HWY_NAMESPACE {

template <class From, class To>
void convert_tile(const From* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, To* to,
                  std::int64_t to_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const From* source = from + r * from_stride;
    To* target = to + r * to_stride;
    for_vectors(columns, [&](std::int64_t i, std::int64_t lanes) {
      store_at(load_at(source, i, lanes), target, i, lanes);
    });
  }
}

void widen(DataType dtype, const void* from, std::int64_t from_stride, std::int64_t rows,
           std::int64_t columns, float* to, std::int64_t to_stride) {
  switch (dtype) {
    case DataType::bfloat16:
      return convert_tile(static_cast<const bfloat16*>(from), from_stride, rows, columns, to, to_stride);
    case DataType::float16:
      return convert_tile(static_cast<const float16*>(from), from_stride, rows, columns, to, to_stride);
    default:
      return convert_tile(static_cast<const float*>(from), from_stride, rows, columns, to, to_stride);
  }
}

void narrow(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
            DataType dtype, void* to, std::int64_t to_stride) {
  switch (dtype) {
    case DataType::bfloat16:
      return convert_tile(from, from_stride, rows, columns, static_cast<bfloat16*>(to), to_stride);
    case DataType::float16:
      return convert_tile(from, from_stride, rows, columns, static_cast<float16*>(to), to_stride);
    default:
      return convert_tile(from, from_stride, rows, columns, static_cast<float*>(to), to_stride);
  }
}

}  // namespace tranche::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tranche::kernels::cpu {

HWY_EXPORT(widen);
HWY_EXPORT(narrow);

void widen_tile(DataType dtype, const void* from, std::int64_t from_stride, std::int64_t rows,
                std::int64_t columns, float* to, std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(widen)(dtype, from, from_stride, rows, columns, to, to_stride);
}

void narrow_tile(const float* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns,
                 DataType dtype, void* to, std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(narrow)(from, from_stride, rows, columns, dtype, to, to_stride);
}

}  // namespace tranche::kernels::cpu
#endif
