#pragma once
/// A parameter of a module, which uses the engine's memory while its unit is gathered.

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tranche::libtorch::detail {

/// A storage without memory can refuse reads with a text of ours, from LibTorch 2.3 on, and later versions
/// can stop refusing. Before 2.3 a closed parameter is null.
template <class Storage>
inline constexpr bool can_refuse = requires(Storage& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
};
template <class Storage>
inline constexpr bool can_allow = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};
inline constexpr bool names_closed_parameters = can_refuse<c10::StorageImpl>;
inline constexpr bool names_closed_views = can_allow<c10::StorageImpl>;

template <class Storage>
void refuse_reads(Storage& storage, const std::string& text) {
  if constexpr (can_refuse<Storage>) storage.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}
template <class Storage>
void allow_reads(Storage& storage) {
  if constexpr (can_allow<Storage>) storage.clear_data_ptr_access_error_msg_();
}

/// A storage of the given size without memory.
inline c10::intrusive_ptr<c10::StorageImpl> null_storage(std::int64_t bytes, at::Device device) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                               c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false);
}

struct Parameter {
  std::string name;
  at::Tensor tensor;
  std::vector<std::string> aliases = {};
  /// The tensor's storage while its unit is gathered. It is the same object for the parameter's lifetime,
  /// whatever memory it points to, because autograd saves parameters and their views. Views share it, and so
  /// see the memory of each gather.
  c10::intrusive_ptr<c10::StorageImpl> storage = {};
  /// The tensor's storage between gathers. It always refuses reads, because not every LibTorch can make a
  /// refusing storage readable again. If LibTorch can, `storage` refuses as well, and with it the views that
  /// a graph saved.
  c10::intrusive_ptr<c10::StorageImpl> closed = {};

  /// Frees the parameter's own memory and closes the parameter.
  void adopt(at::ScalarType type, at::Device device) {
    const auto bytes = tensor.numel() * static_cast<std::int64_t>(c10::elementSize(type));
    storage = null_storage(bytes, device);
    closed = null_storage(bytes, device);
    refuse_reads(*closed, refusal());
    tensor.set_data(at::empty({0}, at::TensorOptions().dtype(type).device(device))
                        .set_(c10::Storage(storage), 0, tensor.sizes(), {}));
    close();
  }
  /// Lets the parameter use the memory of a gather.
  void open(void* data) {
    storage->set_data_ptr_noswap({data, storage->device()});
    allow_reads(*storage);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(storage));
  }
  void close() noexcept {
    storage->set_data_ptr_noswap({nullptr, storage->device()});
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(closed));
    if constexpr (names_closed_views) {
      try {
        refuse_reads(*storage, refusal());
      } catch (...) {  // no memory for the text, so the view is null
      }
    }
  }

 private:
  std::string refusal() const {
    return "parameter " + name +
           " is used while its unit is not gathered: use it inside a call of its Unit<>, or in Unit::with()";
  }
};

}  // namespace tranche::libtorch::detail
