{{/* The config, and what its replicas need. */}}

{{/* The text of the config. With API keys, `access` of a config of this chart is no comment any more. */}}
{{- define "saturate.configText" -}}
{{- $text := .Values.configText | default (.Files.Get (printf "configs/%s.yaml" .Values.config)) -}}
{{- if .Values.apiKeys.secret -}}
{{- $text = regexReplaceAll "(?m)^( *)# access:\n *#   keys_file: (\\S+)$" $text "${1}access:\n${1}  keys_file: ${2}" -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* The name of the value that the config comes from, for messages. */}}
{{- define "saturate.configSource" -}}
{{- if .Values.configText }}configText{{ else }}config {{ .Values.config }}{{ end -}}
{{- end -}}

{{/* Fails if the pods can't run the config. */}}
{{- define "saturate.checkConfig" -}}
{{- $source := include "saturate.configSource" . -}}
{{- $config := include "saturate.configText" . | fromYaml -}}
{{- if hasKey $config "Error" -}}
{{- fail (printf "%s: this is not YAML: %s" $source $config.Error) -}}
{{- end -}}
{{- if ne (len ($config.applications | default list)) 1 -}}
{{- fail (printf "%s: applications: must be a list of one application" $source) -}}
{{- end -}}
{{- if ne (toString (dig "http_options" "host" "0.0.0.0" $config)) "0.0.0.0" -}}
{{- fail (printf "%s: http_options.host: must be 0.0.0.0, for other pods, not %v" $source $config.http_options.host) -}}
{{- end -}}
{{- if ne (int (dig "http_options" "port" 8000 $config)) 8000 -}}
{{- fail (printf "%s: http_options.port: must be 8000, the port of the pods, not %v" $source $config.http_options.port) -}}
{{- end -}}
{{- $app := first $config.applications -}}
{{- if and .Values.apiKeys.secret (not (dig "args" "access" "keys_file" "" $app)) -}}
{{- fail (printf "apiKeys.secret: %s has no args.access.keys_file; set it to /etc/saturate/keys.yaml" $source) -}}
{{- end -}}
{{- if and (not .Values.apiKeys.secret) (dig "args" "access" "keys_file" "" $app) -}}
{{- fail (printf "apiKeys.secret: %s has args.access.keys_file; name the Secret with the keys" $source) -}}
{{- end -}}
{{- end -}}

{{/*
What the config's replicas need, as YAML: `low` and `high`, the cores of the replicas without a GPU; `gpuLow` and
`gpuHigh`, the replicas with GPUs; `hosts`, the pods of one of these; `gpus` and `gpuCores` of a pod; `engines`, the
engines without a GPU.
*/}}
{{- define "saturate.needs" -}}
{{- $source := include "saturate.configSource" . -}}
{{- $app := first (include "saturate.configText" . | fromYaml).applications -}}
{{- $found := dict "low" 0.0 "high" 0.0 "gpuLow" 0 "gpuHigh" 0 "gpus" 0 "gpuCores" 0.0 "hosts" 1 "engines" list -}}
{{- $wide := dict -}}
{{- range $app.args.models -}}
{{- $nodes := .nodes | default 1 | int -}}
{{- if gt $nodes 1 -}}
{{- $sizes := .engine | default dict -}}
{{- $gpus := mul ($sizes.tensor_parallel_size | default 1) ($sizes.pipeline_parallel_size | default 1) -}}
{{- $_ := set $wide (printf "Engine:%s" .id) (dict "hosts" $nodes "gpus" (div $gpus $nodes)) -}}
{{- end -}}
{{- end -}}
{{- range $app.deployments -}}
{{- $hosts := 1 -}}
{{- $options := .ray_actor_options | default dict -}}
{{- with index $wide .name -}}
{{- $hosts = .hosts -}}
{{- $options = dict "num_gpus" .gpus "num_cpus" .gpus -}}
{{- end -}}
{{- $count := .num_replicas | default 1 -}}
{{- if not (or (kindIs "float64" $count) (kindIs "int" $count)) -}}
{{- fail (printf "%s: %s: num_replicas: must be a number, not %v; name the numbers in autoscaling_config" $source .name $count) -}}
{{- end -}}
{{- $scaling := .autoscaling_config | default dict -}}
{{- $low := dig "min_replicas" (ternary 1 $count (hasKey . "autoscaling_config")) $scaling | int -}}
{{- $high := dig "max_replicas" (ternary 1 $count (hasKey . "autoscaling_config")) $scaling | int -}}
{{- $cores := dig "num_cpus" 1 $options | float64 -}}
{{- if dig "num_gpus" 0 $options -}}
{{- if and $found.gpus (or (ne $cores $found.gpuCores) (ne (int $options.num_gpus) (int $found.gpus)) (ne $hosts (int $found.hosts))) -}}
{{- fail (printf "%s: %s: all deployments with GPUs must reserve the same num_gpus, num_cpus and nodes, since a pod has the GPUs of one replica" $source .name) -}}
{{- end -}}
{{- $_ := set $found "gpus" (int $options.num_gpus) -}}
{{- $_ := set $found "gpuCores" $cores -}}
{{- $_ := set $found "hosts" $hosts -}}
{{- $_ := set $found "gpuLow" (add $found.gpuLow $low) -}}
{{- $_ := set $found "gpuHigh" (add $found.gpuHigh $high) -}}
{{- else -}}
{{- $_ := set $found "low" (addf $found.low (mulf $low $cores)) -}}
{{- $_ := set $found "high" (addf $found.high (mulf $high $cores)) -}}
{{- if hasPrefix "Engine:" .name -}}
{{- $_ := set $found "engines" (append $found.engines .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}
