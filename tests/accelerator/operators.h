// Operators: copies, views, and a fallback that runs every other one on a stream, with the kernel of the CPU.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

namespace simulated {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// The host draws a seed for each kernel, in the order of the calls.
at::Generator& generator = *new at::Generator(at::make_generator<at::CPUGeneratorImpl>());

at::Generator seeded_by(at::Generator given) {
    std::lock_guard lock(given.mutex());
    return at::make_generator<at::CPUGeneratorImpl>(given.get<at::CPUGeneratorImpl>()->random64());
}

// Return `value` with `change` applied to each tensor in it.
template <typename Change>
IValue with_tensors(const IValue& value, Change change) {
    if (value.isTensor() && value.toTensor().defined()) return change(value.toTensor());
    if (!value.isList()) return value;
    auto changed = value.toList().copy();
    for (size_t i = 0; i < changed.size(); ++i) changed.set(i, with_tensors(changed.get(i), change));
    return changed;
}

// Return `arguments` for a call of the same operator on `device`, with `change` applied to each tensor.
template <typename Change>
Stack arguments_on(Device device, const Stack& arguments, Change change) {
    Stack made;
    for (const IValue& argument : arguments) {
        made.push_back(argument.isDevice() ? IValue(device) : with_tensors(argument, change));
    }
    return made;
}

Device device_of(const Stack& arguments) {
    Device found(kType, current_device);
    for (const IValue& argument : arguments) {
        if (argument.isDevice()) found = Device(kType, or_current(argument.toDevice().index()));
        with_tensors(argument, [&](const Tensor& tensor) {
            if (is_on_device(tensor)) found = tensor.device();
            return tensor;
        });
    }
    return found;
}

Tensor meta_like(const Tensor& tensor) {
    if (tensor.is_cpu()) return tensor;  // a number, whose dtype counts less, or indices
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
}

Tensor resized(const Tensor& tensor, at::IntArrayRef sizes) {
    return tensor.sizes() == sizes ? tensor : at::native::resize_(tensor, sizes);
}

// Return the results of a call before its kernel has run. Return nothing if only the kernel finds their sizes.
std::optional<Stack> results_of(const OperatorHandle& op, const Stack& arguments, Device device) {
    Stack metas = arguments_on(at::kMeta, arguments, meta_like), results = metas;
    try {
        at::AutoDispatchBelowADInplaceOrView guard;
        op.callBoxed(&results);
    } catch (const std::exception&) {
        return std::nullopt;
    }
    for (IValue& result : results) {
        if (!result.isTensor() && !result.isTensorList()) return std::nullopt;
        auto written = std::find_if(metas.begin(), metas.end(), [&](auto& meta) { return meta.is(result); });
        if (result.isTensor() && written != metas.end() && !written->isNone()) {
            auto& argument = arguments[written - metas.begin()].toTensor();
            result = resized(argument, result.toTensor().sizes());
        } else {
            result = with_tensors(result, [&](const Tensor& meta) {
                return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
            });
        }
    }
    return results;
}

void copy_result(const IValue& from, const IValue& to) {
    if (to.isList()) {
        for (size_t i = 0; i < to.toList().size(); ++i) copy_result(from.toList().get(i), to.toList().get(i));
    } else if (from.toTensor().numel() != 0 && to.toTensor().const_data_ptr() != from.toTensor().const_data_ptr()) {
        to.toTensor().copy_(from.toTensor());  // where the CPU leaves a result empty, other devices may fill it
    }
}

void queue_kernel(const OperatorHandle& op, const Stack& arguments, const Stack& results) {
    Stack inputs = arguments_on(at::kCPU, arguments, [](const Tensor& tensor) {
        bool may_change = !is_on_device(tensor) && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return may_change ? tensor.clone() : for_kernels(tensor);
    });
    Stack outputs = arguments_on(at::kCPU, results, [](const Tensor& tensor) { return for_kernels(tensor); });
    current_queue(current_device).push([op, inputs, outputs] {
        Stack stack = inputs;
        op.callBoxed(&stack);
        for (size_t i = 0; i < stack.size(); ++i) copy_result(stack[i], outputs[i]);
    });
}

void run(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const auto& declared = op.schema().arguments();
    Stack arguments = torch::jit::last(*stack, declared.size()).vec();
    Device device = device_of(arguments);
    c10::DeviceGuard guard(device);
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (declared[i].name() != "generator") continue;
        arguments[i] = seeded_by(arguments[i].isGenerator() ? arguments[i].toGenerator() : generator);
    }
    auto results = results_of(op, arguments, device);
    if (!results) return at::native::cpu_fallback(op, stack, /*error_on_views=*/true, DispatchKey::CPU);
    queue_kernel(op, arguments, *results);
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), results->begin(), results->end());
}

void run_sparse(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true, DispatchKey::SparseCPU);
}

// For convolutions, torch calls operators of other names on a device than on the CPU.
void convolution(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    bool is_forward = op.operator_name().name == "aten::convolution_overrideable";
    if (!is_forward) {  // on the CPU, the sizes of the bias follow the weight
        auto arguments = stack->end() - op.schema().arguments().size();
        stack->insert(arguments + 3, IValue(std::vector<int64_t>{arguments[0].toTensor().size(1)}));
    }
    const char* name = is_forward ? "aten::convolution" : "aten::convolution_backward";
    run(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), keys, stack);
}

// The host waits for copies from and to its memory, unless that is pinned and the caller does not want to wait.
Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
    Tensor from = source.expand_as(to), host = from.is_cpu() ? from : to;
    Queue& queue = current_queue((from.is_cpu() ? to : from).get_device());
    Queue& other = current_queue((to.is_cpu() ? from : to).get_device());  // another one between two devices
    if (&queue != &other) queue.wait_for(other.moment());
    queue.push([from = for_kernels(from), to = for_kernels(to)] { to.copy_(from); });
    if (&queue != &other) other.wait_for(queue.moment());
    bool is_late = !host.is_cpu() || (non_blocking && only<PinnedAllocator>().contains(host.storage().data()));
    if (!is_late) wait_on_host(queue.moment());
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    return copy_from(from, resized(to, from.sizes()), false);
}

Tensor copy_sparse_from_and_resize(const Tensor& from, const Tensor& to) {
    return at::native::copy_sparse_(const_cast<Tensor&>(to), from);
}

at::Scalar item(const Tensor& tensor) { return tensor.cpu().item(); }

void record_stream(Tensor& self, Stream stream) { only<DeviceAllocator>().record(self.storage().data_ptr(), stream); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
    c10::DeviceGuard guard(storage.device());
    auto data = only<DeviceAllocator>().allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) {
        char *from = kernel_address(storage.data()), *to = kernel_address(data.get());
        current_queue(current_device).push([=] { memcpy(to, from, kept); });
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
}

constexpr c10::DispatchKeySet kKeys(DispatchKey::PrivateUse1);

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device.value_or(Device(kType)));
    return at::detail::empty_generic(sizes, &only<DeviceAllocator>(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device.value_or(Device(kType)));
    auto type = c10::dtype_or_default(dtype);
    return at::detail::empty_strided_generic(sizes, strides, &only<DeviceAllocator>(), kKeys, type);
}

template <auto* function>
torch::CppFunction boxed() {
    return torch::CppFunction::makeFromBoxedFunction<function>();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("resize_", at::native::resize_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", item);
    library.impl("record_stream", record_stream);
    library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
    library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    library.impl("set_.source_Tensor", at::native::set_tensor_);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("unfold", at::native::unfold);
    library.impl("view", at::native::view);
    library.impl("view_as_real", at::native::view_as_real);
    library.impl("view_as_complex", at::native::view_as_complex);
    library.impl("convolution_overrideable", boxed<&convolution>());
    library.impl("convolution_backward_overrideable", boxed<&convolution>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
    library.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
    library.impl("empty.memory_format", at::native::empty_sparse_symint);
    library.impl("_indices", at::native::_indices_sparse);
    library.impl("_values", at::native::_values_sparse);
    library.impl("indices", at::native::indices_sparse);
    library.impl("values", at::native::values_sparse);
    library.impl("_nnz", at::native::_nnz_sparse);
    library.impl("sparse_dim", at::native::sparse_dim_sparse);
    library.impl("dense_dim", at::native::dense_dim_sparse);
    library.impl("is_coalesced", at::native::is_coalesced_sparse);
    library.impl("_coalesced_", at::native::_coalesced_sparse_);
    library.impl("copy_", at::native::copy_sparse_wrapper_);
    library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
    library.impl("_copy_from_and_resize", copy_sparse_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(boxed<&run>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) { library.fallback(boxed<&run_sparse>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// To resolve these views, torch copies them.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Some of those that autocast runs in 16 bits, and one that it runs in 32.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace simulated
