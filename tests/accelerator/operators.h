// The operators: copies and views, and a fallback that runs every other operator of the CPU on a stream.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simulated {

using c10::IValue;
using torch::jit::Stack;

inline bool is_on_device(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == kType;
}

// How often each operator made the host wait, since its results depend on values, or it has no kernel for shapes.
class SynchronousCalls {
  public:
    void add(const std::string& name) {
        std::lock_guard lock(mutex_);
        ++counts_[name];
    }

    std::map<std::string, int> counts() {
        std::lock_guard lock(mutex_);
        return counts_;
    }

  private:
    std::mutex mutex_;
    std::map<std::string, int> counts_;
};

inline SynchronousCalls synchronous_calls;

// Random numbers: the host draws a seed for each kernel.
inline at::Generator& generator_of(DeviceIndex device) {
    static auto* all = new std::vector<at::Generator>(kDevices);
    static std::once_flag made;
    std::call_once(made, [] {
        for (at::Generator& generator : *all) {
            generator = at::make_generator<at::CPUGeneratorImpl>();
        }
    });
    return all->at(or_current(device));
}

inline at::Generator seeded_by(at::Generator generator) {
    std::lock_guard lock(generator.mutex());
    return at::make_generator<at::CPUGeneratorImpl>(generator.get<at::CPUGeneratorImpl>()->random64());
}

// Return `value` with `change` applied to each tensor in it.
template <typename Change>
IValue with_tensors(const IValue& value, Change change) {
    if (value.isTensor()) {
        return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> changed;
        for (const at::Tensor& tensor : value.toTensorVector()) {
            changed.push_back(tensor.defined() ? change(tensor) : tensor);
        }
        return changed;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> changed;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
            changed.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
        }
        return changed;
    }
    return value;
}

inline std::vector<at::Tensor> tensors_in(const IValue& value) {
    std::vector<at::Tensor> found;
    with_tensors(value, [&](const at::Tensor& tensor) {
        found.push_back(tensor);
        return tensor;
    });
    return found;
}

// One call of an operator, with its arguments on the device.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack& stack)
        : op_(op), schema_(op.schema()), arguments_(torch::jit::last(stack, schema_.arguments().size()).vec()) {
        for (const IValue& argument : arguments_) {
            if (argument.isDevice()) {
                device_ = Device(kType, or_current(argument.toDevice().index()));
            }
        }
        for (const IValue& argument : arguments_) {
            for (const at::Tensor& tensor : tensors_in(argument)) {
                device_ = is_on_device(tensor) ? tensor.device() : device_;
            }
        }
    }

    Device device() const { return device_; }

    // Raises an error for tensors on several devices, as CUDA does. Indices, and numbers in tensors, may be on the host.
    void check_devices() const {
        for (const IValue& argument : arguments_) {
            for (const at::Tensor& tensor : tensors_in(argument)) {
                bool is_number = tensor.is_cpu() && tensor.dim() == 0;
                TORCH_CHECK(tensor.device() == device_ || is_number || argument.isOptionalTensorList(),
                            "Expected all tensors to be on the same device, but found ", tensor.device(), " and ",
                            device_, " in ", op_.operator_name());
            }
        }
    }

    // Return what the operator returns, before it has run: its arguments if it writes to them, else new tensors. Return
    // nothing if the results are known only afterwards.
    std::optional<Stack> results() const {
        if (!returns_new_or_written_tensors()) {
            return std::nullopt;
        }
        Stack shapes = on_meta();
        try {
            at::AutoDispatchBelowADInplaceOrView guard;
            op_.callBoxed(&shapes);
        } catch (const std::exception&) {
            return std::nullopt;
        }
        for (size_t place = 0; place < shapes.size(); ++place) {
            auto written = written_by(schema_.returns()[place]);
            shapes[place] = written ? resized(arguments_[*written], shapes[place]) : allocated(shapes[place]);
        }
        return shapes;
    }

    // Queue the operator on the current stream. It writes to `results`.
    void run_late(const Stack& results) const {
        Stack inputs, outputs;
        for (const IValue& argument : arguments_) {
            inputs.push_back(for_late_kernel(argument, schema_.arguments()[inputs.size()]));
        }
        for (const IValue& result : results) {
            outputs.push_back(with_tensors(result, [](const at::Tensor& tensor) { return for_kernels(tensor); }));
        }
        auto copied = written_places();
        current_queue(device_.index()).push([op = op_, inputs, outputs, copied] {
            Stack stack = inputs;
            op.callBoxed(&stack);
            for (size_t place = 0; place < stack.size(); ++place) {
                if (!copied[place]) {
                    copy_tensors(outputs[place], stack[place]);
                }
            }
        });
    }

  private:
    // Return the place of the argument that is returned, if it is one.
    std::optional<size_t> written_by(const c10::Argument& returned) const {
        for (size_t place = 0; place < arguments_.size() && returned.alias_info(); ++place) {
            auto* alias = schema_.arguments()[place].alias_info();
            if (alias && alias->isWrite() && alias->beforeSets() == returned.alias_info()->beforeSets()) {
                return place;
            }
        }
        return std::nullopt;
    }

    std::vector<bool> written_places() const {
        std::vector<bool> made;
        for (const c10::Argument& returned : schema_.returns()) {
            made.push_back(written_by(returned).has_value());
        }
        return made;
    }

    bool returns_new_or_written_tensors() const {
        return std::all_of(schema_.returns().begin(), schema_.returns().end(), [&](const c10::Argument& returned) {
            auto kind = returned.type()->kind();
            bool is_view = returned.alias_info() && !returned.alias_info()->isWrite();
            return !is_view && (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType);
        });
    }

    Stack on_meta() const {
        Stack made;
        for (const IValue& argument : arguments_) {
            if (argument.isDevice()) {
                made.emplace_back(Device(at::kMeta));
            } else if (argument.isGenerator()) {
                made.emplace_back();
            } else {
                made.push_back(with_tensors(argument, [](const at::Tensor& tensor) { return meta_like(tensor); }));
            }
        }
        return made;
    }

    static at::Tensor meta_like(const at::Tensor& tensor) {
        if (tensor.is_cpu() && tensor.dim() == 0) {  // its dtype counts less than that of other tensors
            return tensor;
        }
        auto options = tensor.options().device(at::kMeta).pinned_memory(false);
        auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        made._set_conj(tensor.is_conj());
        made._set_neg(tensor.is_neg());
        return made;
    }

    static IValue resized(const IValue& argument, const IValue& shape) {
        if (argument.isTensor() && argument.toTensor().sizes() != shape.toTensor().sizes()) {
            at::native::resize_(argument.toTensor(), shape.toTensor().sizes());
        }
        return argument;
    }

    IValue allocated(const IValue& shapes) const {
        return with_tensors(shapes, [this](const at::Tensor& shape) {
            return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device_));
        });
    }

    IValue for_late_kernel(const IValue& argument, const c10::Argument& declared) const {
        if (argument.isDevice()) {
            return Device(at::kCPU);
        }
        if (argument.isGenerator()) {
            return seeded_by(argument.toGenerator());
        }
        if (argument.isNone() && declared.type()->str() == "Generator?") {
            return seeded_by(generator_of(device_.index()));
        }
        return with_tensors(argument, [](const at::Tensor& tensor) {
            bool is_constant = tensor.unsafeGetTensorImpl()->is_wrapped_number();
            return is_on_device(tensor) ? for_kernels(tensor) : is_constant ? tensor : tensor.clone();
        });
    }

    static void copy_tensors(const IValue& to, const IValue& from) {
        auto targets = tensors_in(to), sources = tensors_in(from);
        for (size_t place = 0; place < targets.size(); ++place) {
            targets[place].copy_(sources[place]);
        }
    }

    const c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    Stack arguments_;
    Device device_{kType, current_device};
};

inline void run(const c10::OperatorHandle& op, Stack* stack) {
    Call call(op, *stack);
    c10::DeviceGuard guard(call.device());
    call.check_devices();
    auto results = call.results();
    if (!results) {
        synchronous_calls.add(toString(op.operator_name()));
        at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
        return;
    }
    call.run_late(*results);
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->insert(stack->end(), results->begin(), results->end());
}

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    run(op, stack);
}

inline void sparse_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    synchronous_calls.add(toString(op.operator_name()));
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true, c10::DispatchKey::SparseCPU);
}

inline c10::OperatorHandle operator_named(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

inline void convolution(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    run(operator_named("aten::convolution"), stack);
}

inline void convolution_backward(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    // It has one argument more than the operator for accelerators: the sizes of the bias, after the weight.
    auto arguments = stack->end() - op.schema().arguments().size();
    std::vector<int64_t> bias_sizes{arguments[0].toTensor().size(1)};
    stack->insert(arguments + 3, IValue(bias_sizes));
    run(operator_named("aten::convolution_backward"), stack);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Pinned = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
using Sizes = c10::SymIntArrayRef;

inline at::Tensor empty(Sizes sizes, Dtype dtype, Layout, std::optional<Device> device, Pinned, Format format) {
    c10::DeviceGuard guard(device.value_or(Device(kType)));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &device_allocator(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                     format);
}

inline at::Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Layout, std::optional<Device> device, Pinned) {
    c10::DeviceGuard guard(device.value_or(Device(kType)));
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                             &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

// The copies of two devices are on the stream of the source, and the other stream's work is before and after them.
inline void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
    Queue& sends = current_queue(from.get_device());
    Queue& receives = current_queue(to.get_device());
    sends.wait_for(receives.moment());
    sends.push([to = for_kernels(to), from = for_kernels(from)] { to.copy_(from); });
    receives.wait_for(sends.moment());
}

// Copies from and to the host. Only those of pinned memory may be late.
inline void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool is_late) {
    is_late = is_late && pinned_allocator().contains(from.const_data_ptr());
    Queue& queue = current_queue(to.get_device());
    queue.push([to = for_kernels(to), from = is_late ? from : from.clone()] { to.copy_(from); });
    if (!is_late) {
        wait_on_host(queue.moment());
    }
}

inline void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool is_late) {
    is_late = is_late && pinned_allocator().contains(to.const_data_ptr());
    Queue& queue = current_queue(from.get_device());
    queue.push([to = to.detach(), from = for_kernels(from)] { to.copy_(from); });
    if (!is_late) {
        wait_on_host(queue.moment());
    }
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
    auto from = source.expand_as(to);
    if (to.numel() == 0) {
        return to;
    }
    if (from.device() == to.device()) {
        current_queue(to.get_device()).push([to = for_kernels(to), from = for_kernels(from)] { to.copy_(from); });
    } else if (from.is_cpu()) {
        copy_to_device(from, to, non_blocking);
    } else if (to.is_cpu()) {
        copy_to_host(from, to, non_blocking);
    } else {
        copy_between_devices(from, to);
    }
    return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    if (from.is_sparse()) {
        return at::copy_sparse_to_sparse_(const_cast<at::Tensor&>(to), from);
    }
    return copy_from(from, at::native::resize_(to, from.sizes()), false);
}

inline at::Scalar item(const at::Tensor& tensor) {
    return tensor.cpu().item();
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
    c10::DeviceGuard guard(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto made = device_allocator().allocate(bytes);
    if (size_t copied = std::min(bytes, impl->nbytes())) {
        AddressSpace& memory = memory_of(current_device);
        current_queue(current_device).push([to = memory.for_kernels(made.get()), copied,
                                            from = memory.for_kernels(impl->data())] { memcpy(to, from, copied); });
    }
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(bytes);
}

inline at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
    std::optional<int64_t> start;
    if (offset) {
        start = offset->expect_int();
    }
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                             start);
}

inline at::Tensor view(const at::Tensor& self, Sizes sizes) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

inline at::Tensor reshape_alias(const at::Tensor& self, Sizes sizes, Sizes strides) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

inline const at::Tensor& resize(const at::Tensor& self, Sizes sizes, Format format) {
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return at::native::set_tensor_(self, source);
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, Sizes sizes, Sizes strides) {
    return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes),
                                        C10_AS_INTARRAYREF_SLOW(strides));
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    return at::native::set_(self, source);
}

inline at::Tensor& set_nothing(at::Tensor& self) {
    return at::native::set_(self, at::Storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true));
}

inline void record_stream(at::Tensor& self, Stream stream) {
    device_allocator().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", item);
    library.impl("as_strided", as_strided);
    library.impl("view", view);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("resize_", resize);
    library.impl("set_", set_nothing);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("set_.source_Storage", set_whole_storage);
    library.impl("set_.source_Storage_storage_offset", set_storage);
    library.impl("record_stream", record_stream);
    library.impl("unfold", TORCH_FN(at::native::unfold));
    library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
    library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
    library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
    library.impl("convolution_backward_overrideable",
                 torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
    library.impl("_sparse_coo_tensor_with_dims_and_tensors",
                 TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
    library.impl("empty.memory_format", TORCH_FN(at::native::empty_sparse_symint));
    library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
    library.impl("indices", TORCH_FN(at::native::indices_sparse));
    library.impl("values", TORCH_FN(at::native::values_sparse));
    library.impl("_values", TORCH_FN(at::native::_values_sparse));
    library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
    library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
    library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
    library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
    library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
    library.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
    library.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
    library.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&sparse_fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFallthrough());
}

// Some of the operators that autocast runs in 16 bits, or in 32.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace simulated
