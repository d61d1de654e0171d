#include "failing_hdf5.h"

#include <dlfcn.h>
#include <hdf5.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace tranche::testing {

namespace {

struct Refusal {
  std::mutex mutex;
  std::string function;
  int call = 0;
  int seen = 0;
};

Refusal& refusal() {
  static Refusal only;
  return only;
}

/// The id that a call is made with: `id`, or an invalid one if this call is to be refused.
hid_t id_for(const char* function, hid_t id) {
  Refusal& one = refusal();
  const std::lock_guard lock(one.mutex);
  if (one.function != function) return id;
  return ++one.seen == one.call ? H5I_INVALID_HID : id;
}

template <typename Function>
Function* library_function(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    std::fprintf(stderr, "no shared HDF5 has %s\n", name);
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace

FailingHdf5::FailingHdf5(const std::string& function, int call) {
  Refusal& one = refusal();
  const std::lock_guard lock(one.mutex);
  one.function = function;
  one.call = call;
  one.seen = 0;
}

FailingHdf5::~FailingHdf5() {
  const std::lock_guard lock(refusal().mutex);
  refusal().function.clear();
}

bool FailingHdf5::refused() const {
  const std::lock_guard lock(refusal().mutex);
  return refusal().seen >= refusal().call;
}

}  // namespace tranche::testing

#define TRANCHE_EXPORTED __attribute__((visibility("default")))

extern "C" {

TRANCHE_EXPORTED hid_t H5Dcreate2(hid_t place, const char* name, hid_t type, hid_t space, hid_t links,
                                  hid_t creation, hid_t access) {
  using namespace tranche::testing;
  return library_function<decltype(H5Dcreate2)>("H5Dcreate2")(id_for("H5Dcreate2", place), name, type, space,
                                                              links, creation, access);
}

TRANCHE_EXPORTED herr_t H5Lcreate_soft(const char* target, hid_t place, const char* name, hid_t links,
                                       hid_t access) {
  using namespace tranche::testing;
  return library_function<decltype(H5Lcreate_soft)>("H5Lcreate_soft")(target, id_for("H5Lcreate_soft", place),
                                                                      name, links, access);
}

TRANCHE_EXPORTED herr_t H5Pset_virtual(hid_t creation, hid_t space, const char* file, const char* dataset,
                                       hid_t source) {
  using namespace tranche::testing;
  return library_function<decltype(H5Pset_virtual)>("H5Pset_virtual")(id_for("H5Pset_virtual", creation),
                                                                      space, file, dataset, source);
}

}  // extern "C"
