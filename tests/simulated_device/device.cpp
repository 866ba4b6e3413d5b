// A second kind of device whose memory is the host's: "simulated:0" and "simulated:1".
//
// Its tensors are computed by the CPU's kernels, and mixing devices fails as it does on a GPU: tensors of two devices
// in one operation raise, save a CPU scalar and CPU indices of a tensor here, which CUDA takes too. What makes a GPU's
// host wait (a value read, a copy to the host, a result whose size depends on values) is reported to a Python function.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local c10::DeviceIndex current = 0;

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

// ------------------------------------------------------------------ who waits for the device

PyObject* listener = nullptr;  // a Python function of the operation's name; borrowed for the process's life

void report_wait(const std::string& name) {
  if (listener == nullptr) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::object>(listener)(name);
}

const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave.Tensor",
    "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_lstsq",
};
const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::index_put_"};

// ------------------------------------------------------------------ memory, device, random numbers

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(KIND, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator cpu)
      : GeneratorImpl(Device(KIND, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
  at::Generator cpu;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrivateUse1() const { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (int place = 0; place < DEVICES; ++place)
        made.push_back(at::make_generator<Generator>(place, at::detail::createCPUGenerator()));
      return made;
    }();
    return all.at(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index, at::detail::createCPUGenerator());
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return false; }
};

// ------------------------------------------------------------------ the same memory as a tensor of another device

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

Tensor on_device(const Tensor& tensor, Device device) {
  auto* owner = new c10::Storage(tensor.storage());
  void* data = owner->mutable_data();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), owner->nbytes(), c10::DataPtr(data, owner, &release, device),
      device.type() == KIND ? static_cast<c10::Allocator*>(&allocator) : c10::GetAllocator(c10::DeviceType::CPU), true);
  auto key = device.type() == KIND ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU;
  Tensor alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Tensor to_host(const Tensor& tensor) { return on_device(tensor, Device(c10::DeviceType::CPU)); }

// ------------------------------------------------------------------ every operation

struct Call {
  const c10::OperatorHandle& op;
  std::optional<Device> device = std::nullopt;                    // of the tensors here
  std::vector<std::pair<Tensor, Tensor>> aliases = {};  // tensor here, the same memory on the host

  const std::string name() const {
    auto full = op.schema().operator_name();
    return full.overload_name.empty() ? full.name : full.name + "." + full.overload_name;
  }

  void look(const Tensor& tensor) {
    if (!is_here(tensor)) return;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at "
                "least two devices, ", *device, " and ", tensor.device(), "! (when checking ", name(), ")");
    device = tensor.device();
  }

  Tensor host(const Tensor& tensor, bool cpu_taken) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      TORCH_CHECK(!device || cpu_taken || tensor.dim() == 0, "Expected all tensors to be on the same device, but found "
                  "at least two devices, ", *device, " and ", tensor.device(), "! (when checking ", name(), ")");
      return tensor;
    }
    for (auto& [here, alias] : aliases)
      if (here.is_same(tensor)) return alias;
    aliases.emplace_back(tensor, to_host(tensor));
    return aliases.back().second;
  }

  Tensor back(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() == KIND) return tensor;
    for (auto& [here, alias] : aliases)
      if (alias.is_same(tensor)) return here;
    return on_device(tensor, *device);
  }

  // An output that the CPU's kernel made larger has left the memory of the tensor here.
  void write_back() {
    for (auto& [here, alias] : aliases) {
      if (alias.sizes() == here.sizes() && alias.data_ptr() == here.data_ptr()) continue;
      auto fresh = on_device(alias, here.device());
      const_cast<Tensor&>(here).unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      here.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

template <typename Function>
IValue map_tensors(const IValue& value, Function&& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

bool selects_by_mask(const IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (const auto& index : value.toOptionalTensorVector())
    if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return false;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call call{op};
  const auto arguments = op.schema().arguments().size(), results = op.schema().returns().size();
  const auto start = stack->size() - arguments;
  const bool indexing = INDEXING.count(call.name()) > 0;
  bool masked = false;
  for (size_t place = 0; place < arguments; ++place) {
    const IValue& value = (*stack)[start + place];
    map_tensors(value, [&](const Tensor& tensor) { call.look(tensor); return tensor; });
    masked |= call.name() == "aten::_index_put_impl_" && selects_by_mask(value);  // of a read, nonzero is seen
    if (value.isDevice() && !call.device && value.toDevice().type() == KIND)
      call.device = Device(KIND, value.toDevice().has_index() ? value.toDevice().index() : current);
  }
  if (masked || WAITING.count(call.name())) report_wait(call.name());
  for (size_t place = 0; place < arguments; ++place) {
    IValue& value = (*stack)[start + place];
    const bool indices = indexing && value.isOptionalTensorList();
    if (value.isGenerator()) {
      auto* impl = value.toGenerator().unsafeGetGeneratorImpl();
      TORCH_CHECK(impl->device().type() == KIND, "Expected a 'simulated' device type for generator but found '",
                  impl->device().type(), "'");
      value = static_cast<Generator*>(impl)->cpu;
    } else if (value.isDevice()) {
      value = Device(c10::DeviceType::CPU);
    } else {
      value = map_tensors(value, [&](const Tensor& tensor) { return call.host(tensor, indices); });
    }
  }
  if (!call.device) call.device = Device(KIND, current);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  for (size_t place = stack->size() - results; place < stack->size(); ++place)
    (*stack)[place] = map_tensors((*stack)[place], [&](const Tensor& tensor) { return call.back(tensor); });
}

// ------------------------------------------------------------------ what has to be said by hand: making, viewing, copying

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(KIND, current)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (is_here(from) && !is_here(to)) report_wait("copy to the host");
  if (!is_here(from) && is_here(to) && !non_blocking) report_wait("copy from the host");
  (is_here(to) ? to_host(to) : to).copy_(is_here(from) ? to_host(from) : from);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto data = allocator.allocate(bytes);
    std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    self.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() != nullptr && !stride.empty())
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  else
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the kernel made of plain operations
}

// A GPU counts whole numbers, too.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return on_device(to_host(self).to(at::kDouble).histc(bins, low, high).to(self.scalar_type()), self.device());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("histc", &histc);
  library.impl("_fused_sdp_choice", &choose_attention);
}

// Autocast does on this device what it does on a GPU.
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
#define SAY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SAY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("listen", [](const pybind11::object& function) {
    Py_XDECREF(listener);
    listener = function.is_none() ? nullptr : function.inc_ref().ptr();
  });
  module.def("current_device", [] { return static_cast<int>(current); });
  module.def("set_device", [](int index) { current = static_cast<c10::DeviceIndex>(index); });
  module.def("default_generator", [](int index) { return hooks.getDefaultGenerator(index); });
}
