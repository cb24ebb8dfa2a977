// What the form of a new job holds to repeat a job.

const LORA_RATE = 2e-4;

/** Values of the form's fields by name; what no field has is in `settings`, as JSON. */
export function valuesOf(job) {
  const kind = job.method?.type || "supervised";
  const hyper = job.method?.[kind]?.hyperparameters || {};
  const { num_train_epochs: epochs, global_batch_size: batch, learning_rate: rate, max_steps, max_length, adapter, ...others } = job.settings;
  delete others.init_adapter; // It is the job's model.
  const values = { model: job.model, suffix: job.user_provided_suffix, kind, seed: job.seed, priority: job.priority, max_steps, max_length };

  // A hyper-parameter goes back into its field if the service would make the same setting of it, else among the others.
  const put = (name, setting, value, isSame) => {
    if (isSame) values[name] = hyper[name];
    else if (value !== undefined) others[setting] = value;
  };
  put("n_epochs", "num_train_epochs", max_steps ? undefined : epochs, epochs === hyper.n_epochs && epochs <= 50);
  put("batch_size", "global_batch_size", batch, batch === hyper.batch_size && batch <= 256);
  put("learning_rate_multiplier", "learning_rate", rate, rate === LORA_RATE * hyper.learning_rate_multiplier);
  if (kind === "dpo") {
    delete others.objective;
    put("beta", "beta", others.beta, hyper.beta <= 2);
    if (values.beta !== undefined) delete others.beta;
  }

  const { r, lora_alpha: alpha, lora_dropout: dropout, target_modules, ...shape } = adapter || {};
  const modules = [target_modules].flat().join(", ");
  const isShown = Array.isArray(target_modules) || modules.startsWith("all-");
  Object.assign(values, { r, alpha, dropout, target_modules: isShown ? modules : "" });
  if (modules && !isShown) shape.target_modules = target_modules;
  if (Object.keys(shape).length) others.adapter = shape;
  return { ...values, settings: json(others), metadata: json(job.metadata), integrations: json(job.integrations) };
}

function json(value) {
  return value && Object.keys(value).length ? JSON.stringify(value, null, 1) : "";
}
